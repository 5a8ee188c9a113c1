// Adam with decoupled weight decay (Loshchilov and Hutter, 2017, arXiv:1711.05101), as torch.optim.AdamW computes it:
//
//   adamw_update(dev, params, m, v, grads, a, n)         with g = grad_scale * grads, step = 1, 2, ...
//       m = beta1 * m + (1 - beta1) * g          v = beta2 * v + (1 - beta2) * g^2
//       params = params * (1 - lr * weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
//
//   params (n) Floats<X>: updated as floats; in bf16 the model sees them rounded to nearest, ties away from zero (floats.h)
//   m, v, grads (n) float     nothing may alias
#pragma once
#include <cmath>
#include <cstddef>

#include "../core/device.h"
#include "../core/floats.h"

struct AdamW {  // double, because 1 - 0.999f is off by 1e-5
    double lr, beta1, beta2, eps, weight_decay;
    double grad_scale;  // for example max_norm / norm where gradients are clipped
    size_t step;        // the first update is step 1
};

// The factors of one step, in float, and the update of one parameter.
struct AdamWFactors {
    float scale, one_minus_beta1, beta2, one_minus_beta2, eps, decay, step_size, root_correction2;

    explicit AdamWFactors(const AdamW &a)
        : scale(float(a.grad_scale)),
          one_minus_beta1(float(1 - a.beta1)),
          beta2(float(a.beta2)),
          one_minus_beta2(float(1 - a.beta2)),
          eps(float(a.eps)),
          decay(float(1 - a.lr * a.weight_decay)),
          step_size(float(a.lr / (1 - std::pow(a.beta1, double(a.step))))),
          root_correction2(float(std::sqrt(1 - std::pow(a.beta2, double(a.step))))) {}

    HOST_DEVICE void update(float &p, float &m, float &v, float grad) const {
        const float g = scale * grad;
        m = m + one_minus_beta1 * (g - m);
        v = beta2 * v + one_minus_beta2 * g * g;
        p = p * decay - step_size * m / (sqrtf(v) / root_correction2 + eps);
    }
};

template <class X> void adamw_update(Cpu<X> dev, Floats<X> params, float *m, float *v, const float *grads, AdamW a, size_t n) {
    const AdamWFactors factors(a);
#pragma omp parallel for simd num_threads(dev.threads)
    for (size_t i = 0; i < n; i++) {
        float p = params.load(i), m_i = m[i], v_i = v[i];
        factors.update(p, m_i, v_i, grads[i]);
        m[i] = m_i;
        v[i] = v_i;
        params.store(i, p);
    }
}
