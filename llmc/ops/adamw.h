// Adam with decoupled weight decay (Loshchilov and Hutter, 2017, arXiv:1711.05101), as torch.optim.AdamW computes it:
//
//   adamw_update(dev, params, m, v, grads, a, n)         with g = grad_scale * grads, step = 1, 2, ...
//       m = beta1 * m + (1 - beta1) * g          v = beta2 * v + (1 - beta2) * g^2
//       params = params * (1 - lr * weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
//
//   params (n) Floats<X>: updated as floats; in bf16 the model sees them rounded to nearest, ties away from zero (floats.h)
//   grads (n) G, m, v (n) M, each float or bf16     nothing may alias
//
// Moments in bf16 are rounded stochastically. With rounding to nearest they would not change if a step's change is less than half a unit in the
// last place. With beta2 = 0.999 this happens to v if (1 - beta2) (g^2 - v) is below 2^-9 v. The random bits of an element are a function of
// (seed, step, its number in the model), so no bit depends on ranks or threads.
//
// Moments may also be Blockwise, in 8 bits (../core/blockwise.h): m and v are decoded and updated as floats; the parameters are updated from these
// floats; then m and v are encoded with a new scale for each block.
#pragma once
#include <cmath>
#include <cstddef>

#include "../core/blockwise.h"
#include "../core/device.h"
#include "../core/floats.h"
#include "../core/rng.h"
#include "settings.h"

// The constants of one step, in float, and the update of one parameter.
struct AdamWFactors {
    float scale, one_minus_beta1, beta2, one_minus_beta2, eps, decay, step_size, root_correction2;
    Random random;
    size_t first;

    explicit AdamWFactors(const AdamW &a)
        : scale(float(a.grad_scale)),
          one_minus_beta1(float(1 - a.beta1)),
          beta2(float(a.beta2)),
          one_minus_beta2(float(1 - a.beta2)),
          eps(float(a.eps)),
          decay(float(1 - a.lr * a.weight_decay)),
          step_size(float(a.lr / (1 - std::pow(a.beta1, double(a.step))))),
          root_correction2(float(std::sqrt(1 - std::pow(a.beta2, double(a.step))))),
          random{a.seed, Purpose::rounding, uint32_t(a.step)},
          first(a.first) {}

    HOST_DEVICE void update(float &p, float &m, float &v, float grad) const {
        const float g = scale * grad;
        m = m + one_minus_beta1 * (g - m);
        v = beta2 * v + one_minus_beta2 * g * g;
        p = p * decay - step_size * m / (sqrtf(v) / root_correction2 + eps);
    }

    // Stores the moments of element i.
    HOST_DEVICE void store(float &to_m, float &to_v, float m, float v, size_t) const { to_m = m, to_v = v; }
    HOST_DEVICE void store(bf16 &to_m, bf16 &to_v, float m, float v, size_t i) const {
        const uint32_t bits = random.block(first + i)[0];
        to_m = round_stochastically(m, bits & 0xffff), to_v = round_stochastically(v, bits >> 16);
    }
};

template <class X, class M, class G>
void adamw_update(Cpu<X> dev, Floats<X> params, M *m, M *v, const G *grads, AdamW a, size_t n) {
    const AdamWFactors factors(a);
#pragma omp parallel for simd num_threads(dev.threads)
    for (size_t i = 0; i < n; i++) {
        float p = params.load(i), m_i = m[i], v_i = v[i];
        factors.update(p, m_i, v_i, grads[i]);
        factors.store(m[i], v[i], m_i, v_i, i);
        params.store(i, p);
    }
}

template <class X, class G>
void adamw_update(Cpu<X> dev, Floats<X> params, Blockwise m, Blockwise v, const G *grads, AdamW a, size_t n) {
    const AdamWFactors factors(a);
    const float *const of_m = fractions(true).of, *const of_v = fractions(false).of;
#pragma omp parallel for num_threads(dev.threads)
    for (size_t b = 0; b < m.blocks(); b++) {
        const size_t begin = std::max(b * Blockwise::size, m.skip) - m.skip,
                     end = std::min((b + 1) * Blockwise::size - m.skip, n);
        float m_b[Blockwise::size], v_b[Blockwise::size], most_m = 0, most_v = 0;
        for (size_t i = begin; i < end; i++) {
            float p = params.load(i), &m_i = m_b[i - begin], &v_i = v_b[i - begin];
            m_i = of_m[m.codes[i]] * m.scales[b], v_i = of_v[v.codes[i]] * v.scales[b];
            factors.update(p, m_i, v_i, grads[i]);
            params.store(i, p);
            most_m = std::max(most_m, std::abs(m_i)), most_v = std::max(most_v, v_i);
        }
        for (size_t i = begin; i < end; i++)
            m.codes[i] = code_of(of_m, most_m, m_b[i - begin]), v.codes[i] = code_of(of_v, most_v, v_b[i - begin]);
        m.scales[b] = most_m, v.scales[b] = most_v;
    }
}

REHEARSED(adamw_update);
