// Whether numbers are neither NaN nor infinite, from their bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ddrl {

template <class Word>
bool finite_words(const std::byte* from, size_t count, Word exponent) {
    bool all = true;
    for (size_t i = 0; i < count; ++i) {
        Word word;
        std::memcpy(&word, from + i * sizeof word, sizeof word);
        all &= (word & exponent) != exponent;
    }
    return all;
}

// `width`: bytes of a number, 2, 4 or 8.
inline bool finite(const std::byte* from, size_t count, size_t width) {
    if (width == 4) return finite_words<uint32_t>(from, count, 0x7F800000u);
    if (width == 8) return finite_words<uint64_t>(from, count, 0x7FF0000000000000u);
    return finite_words<uint16_t>(from, count, 0x7C00u);
}

}  // namespace ddrl
