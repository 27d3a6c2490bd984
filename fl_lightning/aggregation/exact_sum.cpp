// Sums of integers of exact_sum.py in one pass over the values, with the bits of the code there. No product may be
// contracted with what follows it: it is rounded to double first.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr std::int64_t BLOCK = 256;  // values of a client before the next one: of 2048 it took twice the time
constexpr std::int64_t CLIENTS = 8;  // whose pages are at hand together
constexpr std::uint32_t MAX_MAGNITUDE = 0x49800000;  // the bits of 2^20 as a float; those of infinity and NaN are larger
// A double in [2^52, 2^53] has no bits behind the binary point. So p + SHIFT is rounded to an integer, half to even,
// and as the bits of such doubles follow each other like integers, they differ from those of SHIFT by that integer.
constexpr double SHIFT = 6755399441055744.0;        // 1.5 * 2^52
constexpr double MAX_SHIFTED = 2251799813685248.0;  // 2^51

template <typename To, typename From>
To bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To same;
    std::memcpy(&same, &value, sizeof same);
    return same;
}

}  // namespace

extern "C" {

// Adds round_half_even(scale x) of each client to sums.
// vectors: x of each client; begin, end: the values that are added; sums: end - begin integers.
// Returns 1 where a value is 2^20 or more, or no number: the sums are of no use then. Else 0.
int add_scaled(const float* const* vectors, const double* scales, std::int64_t clients, std::int64_t begin,
               std::int64_t end, std::int64_t* sums) {
    const std::uint64_t shift = bits<std::uint64_t>(SHIFT);
    for (; clients > CLIENTS; clients -= CLIENTS, vectors += CLIENTS, scales += CLIENTS)
        if (add_scaled(vectors, scales, CLIENTS, begin, end, sums)) return 1;
    for (std::int64_t at = begin; at < end; at += BLOCK) {
        const std::int64_t count = end - at < BLOCK ? end - at : BLOCK;
        std::uint64_t* here = reinterpret_cast<std::uint64_t*>(sums) + (at - begin);
        for (std::int64_t k = 0; k < clients; ++k) {
            const float* values = vectors[k] + at;
            const double scale = scales[k];
            std::uint32_t most = 0;
            for (std::int64_t i = 0; i < count; ++i) {
                const std::uint32_t magnitude = bits<std::uint32_t>(values[i]) & 0x7fffffffu;
                most = magnitude > most ? magnitude : most;
                here[i] += bits<std::uint64_t>(scale * values[i] + SHIFT) - shift;
            }
            if (most >= MAX_MAGNITUDE) return 1;
            if (scale * bits<float>(most) < MAX_SHIFTED) continue;
            for (std::int64_t i = 0; i < count; ++i) {  // too large for the shift: taken back, and rounded by name
                const double product = scale * values[i];
                here[i] -= bits<std::uint64_t>(product + SHIFT) - shift;
                here[i] += static_cast<std::uint64_t>(static_cast<std::int64_t>(std::nearbyint(product)));
            }
        }
    }
    return 0;
}

// Writes sums * unit / total, rounded to float at the end.
void divide(const std::int64_t* sums, std::int64_t count, double unit, double total, float* means) {
    for (std::int64_t i = 0; i < count; ++i) means[i] = static_cast<float>(sums[i] * unit / total);
}

}  // extern "C"
