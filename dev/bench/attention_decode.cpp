// Speed at which a decoding step reads the KV cache on this CPU, as a share of a copy in the same run.
//
//   ./attention_decode [threads]
//
// GB/s count each key and value once. A copy counts its reads and writes, but it also loads the lines that it will overwrite, so it makes
// three transfers and counts two; shares can reach 1.5. The heads have SmolLM2-135M's shape. A run reads the caches of several layers,
// 512 MiB together, so they are read from memory as in a model.
#include "../../llmc/ops/attention_decode.h"

#include "bench.h"

static constexpr size_t H = 9, KV = 3, D = 64, bytes = 512 << 20;

static double copy_rate(int threads) {
    std::vector<float> from(bytes / sizeof(float), 1.0f), to(from.size());
    const double time = fastest(5, {[&] {
#pragma omp parallel for simd num_threads(threads)
                                    for (size_t i = 0; i < to.size(); i++) to[i] = from[i];
                                }})[0];
    return 2 * double(bytes) / time;
}

template <class Dev> static void line(Dev dev, size_t B, size_t length, double copy) {
    using X = typename Dev::X;
    const size_t pages = ceil_div(length, cache_page), page_elements = cache_page * 2 * KV * D, layer = B * pages * page_elements;
    const size_t layers = std::max<size_t>(1, bytes / (layer * sizeof(X)));
    const auto page = noise<X>(page_elements, 1), q = noise<X>(B * H * D, 2);
    std::vector<X> cache(layers * layer), out(B * H * D);
    for (size_t i = 0; i < cache.size(); i += page_elements) std::ranges::copy(page, cache.begin() + ptrdiff_t(i));
    std::vector<int32_t> table(B * pages), first_key(B), lengths(B, int32_t(length));
    // The sequences grow together, so they allocate pages in turn.
    for (size_t i = 0; i < table.size(); i++) table[i] = int32_t(i % pages * B + i / pages);
    std::vector<float> scratch(attention_decode_scratch(dev, B, pages, H, D));
    const double time =
        fastest(5, {[&] {
                    for (size_t l = 0; l < layers; l++)
                        attention_decode(dev, out.data(), scratch.data(), Heads<const X>{q.data(), H * D},
                                         {cache.data() + l * layer, table.data(), first_key.data(), lengths.data(), pages},
                                         {B, H, KV, D, 0.125f});
                }})[0];
    const double rate = double(layers * B * length * 2 * KV * D * sizeof(X)) / time;
    printf("%-5s %4zu %6zu %8.1f %6.2f %8.1f\n", dtype_name<X>, B, length, rate * 1e-9, rate / copy, copy * 1e-9);
}

int main(int argc, char **argv) {
    const int threads = threads_argument(argc, argv);
    const ContextPtr ctx = make_context();
    heading("attention_decode", threads);
    const double copy = copy_rate(threads);
    printf("GB/s and share of a copy's\n");
    printf("dtype    B   keys   decode            copy\n");
    for (const auto &[B, length] : {std::pair<size_t, size_t>{64, 512}, {1, 8192}}) {
        line(CpuF32{threads, ctx.get()}, B, length, copy);
        line(CpuBf16{threads, ctx.get()}, B, length, copy);
    }
}
