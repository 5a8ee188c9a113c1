// All ops on CUDA, for a trainer.
#pragma once
#include "../core/memory.cuh"
#include "adamw.cuh"
#include "attention.cuh"
#include "embedding.cuh"
#include "layout.cuh"
#include "loss.cuh"
#include "matmul.cuh"
#include "qk_norm_rope.cuh"
#include "reduce.cuh"
#include "residual.cuh"
#include "rmsnorm.cuh"
#include "swiglu.cuh"
