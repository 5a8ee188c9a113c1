#include "../models.cpp"
