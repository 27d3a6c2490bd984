// The nearest centroid of each sub-vector, with the bits of product.py: differences, squares and sums are rounded to
// float one by one, axis after axis, and of equally near centroids the first one counts.

#include <cstdint>
#include <cstring>
#include <limits>

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;  // floats in a register
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int REGISTERS = 4;  // which meet a centroid one after another: with one it takes 1.6 times as long
constexpr int BLOCK = REGISTERS * WIDTH;

// Vectors of GCC and Clang. Left to the compiler, loops over arrays take three times as long.
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef std::int32_t Ints __attribute__((vector_size(4 * WIDTH)));

}  // namespace

extern "C" {

// columns: value after value of all sub-vectors, [dim, count]; count is a multiple of BLOCK.
// codebook: [centroids, dim]. Writes the index of the nearest centroid and its squared distance, [count] each.
void nearest(const float* columns, std::int64_t count, const float* codebook, std::int32_t centroids,
             std::int64_t dim, std::int32_t* index, float* error) {
    for (std::int64_t at = 0; at < count; at += BLOCK) {
        Floats best[REGISTERS];
        Ints which[REGISTERS];
        for (int v = 0; v < REGISTERS; ++v) {  // where all squares are infinite, it is the first centroid
            best[v] = Floats{} + std::numeric_limits<float>::infinity();
            which[v] = Ints{};
        }
        for (std::int32_t k = 0; k < centroids; ++k) {
            for (int v = 0; v < REGISTERS; ++v) {
                Floats distance{};
                for (std::int64_t axis = 0; axis < dim; ++axis) {
                    Floats values;
                    std::memcpy(&values, columns + axis * count + at + v * WIDTH, sizeof values);
                    const Floats off = values - codebook[k * dim + axis];
                    distance = axis ? distance + off * off : off * off;
                }
                const Ints nearer = distance < best[v];
                best[v] = nearer ? distance : best[v];
                which[v] = nearer ? Ints{} + k : which[v];
            }
        }
        std::memcpy(index + at, which, sizeof which);
        std::memcpy(error + at, best, sizeof best);
    }
}

}  // extern "C"
