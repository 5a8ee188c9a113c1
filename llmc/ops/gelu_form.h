// Names the two forms of GELU (gelu.h). It is a file of its own for configurations, which only name one.
#pragma once

enum class Gelu { erf, tanh };
