// The parts of the replay kernel by themselves: sum tree and random numbers.
#include <cmath>

#include "replay_fixture.hpp"
#include "replay/random.hpp"
#include "replay/sum_tree.hpp"

using namespace ddrl::replay;

namespace {

void the_sum_tree_finds_what_a_plain_prefix_sum_finds() {
    Random random(3, 1);
    for (const u32 capacity : {1u, 15u, 16u, 17u, 255u, 300u, 5000u}) {
        SumTree tree(capacity);
        std::vector<double> mass(capacity, 0.0);
        for (int round = 0; round < 30; ++round) {
            for (u32 i = 0; i < 1 + capacity / 4; ++i) {
                const u32 index = fixture::below(random, capacity);
                const float value = fixture::below(random, 4) ? static_cast<float>(random.unit()) * 10 : 0.0f;
                tree.fill(index, 1, value);
                mass[index] = static_cast<double>(value);
            }
            tree.check(capacity);
            double total = 0;
            for (const double m : mass) total += m;
            EXPECT(std::abs(tree.total() - total) <= 1e-9 * (total + 1));
            if (tree.total() == 0) continue;
            std::vector<double> targets;
            std::vector<u32> found(50);
            for (int i = 0; i < 50; ++i)
                targets.push_back(i == 0   ? 0.0
                                  : i == 1 ? std::nextafter(tree.total(), 0.0)
                                           : random.unit() * tree.total());
            std::vector<double> wanted = targets;
            tree.find(targets, found);
            for (std::size_t i = 0; i < 50; ++i) {
                EXPECT(found[i] < capacity && mass[found[i]] > 0);
                double before = 0;
                for (u32 k = 0; k < found[i]; ++k) before += mass[k];
                EXPECT(wanted[i] >= before - 1e-9 * total && wanted[i] <= before + mass[found[i]] + 1e-9 * total);
            }
        }
    }
}

void masses_of_very_different_size_are_drawn_in_proportion() {
    SumTree tree(1000);
    tree.fill(0, 1000, 1e-6f);
    tree.fill(500, 1, 1e6f);
    Random random(1, 1);
    std::vector<double> target(1000000);
    std::vector<u32> found(target.size());
    for (double& t : target) t = random.unit() * tree.total();
    tree.find(target, found);
    for (const u32 index : found) EXPECT(index == 500);  // the others weigh 1e-9 together
    tree.fill(500, 1, 0.0f);
    for (double& t : target) t = random.unit() * tree.total();
    tree.find(target, found);
    std::vector<int> count(1000);
    for (const u32 index : found) ++count[index];
    EXPECT(count[500] == 0);
    double chi = 0;
    for (u32 i = 0; i < 1000; ++i)
        if (i != 500) chi += std::pow(count[i] - 1e6 / 999, 2) / (1e6 / 999);
    EXPECT(std::abs(chi - 998) < 6 * std::sqrt(2 * 998.0));  // no drift is left of the large mass
}

void random_numbers_are_uniform_and_streams_differ() {
    for (u64 stream = 0; stream < 20; ++stream) {
        Random random(0, stream), other(0, stream + 1);
        std::vector<int> count(97);
        int same = 0;
        for (int i = 0; i < 97000; ++i) {
            ++count[fixture::below(random, 97)];
            same += Random(random).next() == other.next();
        }
        double chi = 0;
        for (const int c : count) chi += (c - 1000.0) * (c - 1000.0) / 1000.0;
        EXPECT(chi > 40 && chi < 180 && same == 0);  // 96 degrees of freedom
    }
}

}  // namespace

int main() {
    RUN(the_sum_tree_finds_what_a_plain_prefix_sum_finds);
    RUN(masses_of_very_different_size_are_drawn_in_proportion);
    RUN(random_numbers_are_uniform_and_streams_differ);
}
