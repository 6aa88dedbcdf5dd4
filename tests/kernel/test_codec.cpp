#include "codec.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "expect.hpp"

static std::vector<std::byte> noise(size_t bytes, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::byte> data(bytes);
    for (auto& byte : data) byte = static_cast<std::byte>(random());
    return data;
}

static std::vector<float> values_of(size_t count, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (auto& value : values) value = normal(random);
    return values;
}

static const std::byte* bytes_of(const std::vector<float>& values) {
    return reinterpret_cast<const std::byte*>(values.data());
}

static void planes_give_back_every_byte_at_any_length_and_alignment() {
    const auto data = noise(400, 1), base = noise(400, 2);
    for (size_t begin = 0; begin < 5; ++begin) {
        for (size_t length = 0; length + begin <= 300; ++length) {
            for (const std::byte* against : {static_cast<const std::byte*>(nullptr), base.data() + begin}) {
                std::vector<std::byte> planes(length), out(length);  // exact, so that a step beyond is seen
                ddrl::split_planes(planes.data(), data.data() + begin, against, length);
                ddrl::join_planes(out.data(), planes.data(), against, length);
                EXPECT(length == 0 || std::memcmp(out.data(), data.data() + begin, length) == 0);
            }
        }
    }
}

static void any_stretch_of_a_tensor_decodes_to_what_the_whole_does_as_int8() {
    const size_t count = 1000;
    const auto values = values_of(count, 3);
    std::vector<std::byte> wire(ddrl::int8_bytes(0, count));
    std::vector<float> whole(count), part(count);
    ddrl::encode_int8(wire.data(), bytes_of(values), count, 0, count);
    ddrl::decode_int8(reinterpret_cast<std::byte*>(whole.data()), wire.data(), 0, count);
    for (size_t first : {0u, 1u, 16u, 255u, 256u, 257u, 700u, 999u}) {
        for (size_t length : {0u, 1u, 16u, 255u, 256u, 300u, 1000u}) {
            if (first + length > count) continue;
            std::vector<std::byte> piece(ddrl::int8_bytes(first, length));
            ddrl::encode_int8(piece.data(), bytes_of(values), count, first, length);
            ddrl::decode_int8(reinterpret_cast<std::byte*>(part.data()), piece.data(), first, length);
            EXPECT(length == 0 || std::memcmp(part.data(), whole.data() + first, 4 * length) == 0);
        }
    }
    for (size_t i = 0; i < count; ++i) {
        float top = 0;
        for (size_t k = i / 256 * 256; k < std::min(count, (i / 256 + 1) * 256); ++k)
            top = std::max(top, std::fabs(values[k]));
        EXPECT(std::fabs(whole[i] - values[i]) <= top / 254 * 1.0001f);
    }
}

static void bf16_keeps_the_upper_half_rounded_and_a_nan_a_nan() {
    const std::vector<float> values{0.0f, -0.0f, 1.0f, -2.5f, 1e38f, 1.00390625f, 1.01171875f, std::nanf(""), INFINITY};
    std::vector<std::byte> wire(2 * values.size());
    std::vector<float> out(values.size());
    ddrl::encode_bf16(wire.data(), bytes_of(values), values.size());
    ddrl::decode_bf16(reinterpret_cast<std::byte*>(out.data()), wire.data(), values.size());
    for (size_t i : {0u, 1u, 2u, 3u, 8u})
        EXPECT(out[i] == values[i] && std::signbit(out[i]) == std::signbit(values[i]));
    EXPECT(out[5] == 1.0f && out[6] == 1.015625f && std::isnan(out[7]));  // ties go to the even neighbor
    EXPECT(std::fabs(out[4] / values[4] - 1) < 1.0f / 256);
}

int main() {
    RUN(planes_give_back_every_byte_at_any_length_and_alignment);
    RUN(any_stretch_of_a_tensor_decodes_to_what_the_whole_does_as_int8);
    RUN(bf16_keeps_the_upper_half_rounded_and_a_nan_a_nan);
}
