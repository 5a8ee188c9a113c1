// Which GELU (gelu.h): by itself, for a configuration that names one and computes nothing.
#pragma once

enum class Gelu { erf, tanh };
