// Snapshots: one consistent moment of a replay as bytes, and back.
//
//   "DDRLRPL1" | u32 length of the configuration | the configuration (JSON) | u64 bytes of structure | u64 bytes of records
//   | u64 checksum of all that | structure | its checksum | records | their checksum
//
// The structure (episodes, picks, selectors, eviction, streams) is copied under the lock; the records are then written without it, while
// recording goes on: records never change, and chunks of evicted episodes wait until the snapshot is done. Reading checks everything first:
// a snapshot that is truncated, corrupt or of another configuration changes nothing.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "checksum.hpp"
#include "replay.hpp"

namespace ddrl::replay {

inline constexpr char SNAPSHOT_MAGIC[8] = {'D', 'D', 'R', 'L', 'R', 'P', 'L', '1'};

class Snapshot {
  public:
    // Writes through put(data, bytes); progress(done, total) is told the bytes of records now and then.
    template <class Put, class Progress>
    static void write(Replay& replay, const std::string& configuration, Put put, Progress progress) {
        Writer structure;
        std::vector<Part> parts;
        u64 ticket;
        {
            std::lock_guard lock(replay.mutex());
            replay.save_structure(structure);
            list_parts(replay.store(), parts);
            ticket = replay.enter();
        }
        struct Leave {
            Replay& replay;
            u64 ticket;
            ~Leave() {
                std::lock_guard lock(replay.mutex());
                replay.leave(ticket);
            }
        } leave{replay, ticket};
        const Store& store = replay.store();
        u64 total = 0;
        for (const Part& part : parts) total += part_bytes(store, part);
        Writer head;
        head.raw(SNAPSHOT_MAGIC, sizeof SNAPSHOT_MAGIC);
        head.value(static_cast<u32>(configuration.size()));
        head.raw(configuration.data(), configuration.size());
        head.value<u64>(structure.bytes().size());
        head.value<u64>(total);
        put_checked(put, head.bytes());
        put_checked(put, structure.bytes());
        Checksum sum;
        u64 done = 0, told = 0;
        for (const Part& part : parts) {
            each_run(store, part, [&](u32 column, std::size_t bytes) {
                const byte* from = store.column(part.chunk, column);
                sum.add(from, bytes);
                put(from, bytes);
                done += bytes;
            });
            if (done - told >= PROGRESS_BYTES) progress(told = done, total);
        }
        const u64 value = sum.value();
        put(&value, sizeof value);
        progress(total, total);
    }

    // Puts the replay into the state that `data` holds. Throws std::runtime_error, with nothing changed, where it cannot be used.
    template <class Progress>
    static void read(Replay& replay, const std::string& configuration, const byte* data, std::size_t bytes, Progress progress) {
        Reader in(data, bytes);
        if (in.left() < 12 || std::memcmp(in.take(8), SNAPSHOT_MAGIC, 8) != 0) throw std::runtime_error("it is not a snapshot of a ddrl replay");
        const u32 length = in.value<u32>();
        const std::string other(reinterpret_cast<const char*>(in.take(length)), length);
        const u64 structure_bytes = in.value<u64>(), record_bytes = in.value<u64>();
        check(in, data, static_cast<std::size_t>(in.take(0) - data));
        if (other != configuration) throw std::runtime_error("it was written by a replay of another configuration: " + other + "; this one is " + configuration);
        if (in.left() != structure_bytes + record_bytes + 2 * sizeof(u64)) throw std::runtime_error("it is truncated");
        const byte* structure = in.take(structure_bytes);
        check(in, structure, structure_bytes);
        const byte* records = in.take(record_bytes);
        Checksum sum;
        for (u64 done = 0; done < record_bytes; done += PROGRESS_BYTES) {
            const u64 part = std::min<u64>(PROGRESS_BYTES, record_bytes - done);
            sum.add(records + done, part);
            progress((done + part) / 2, record_bytes);
        }
        if (in.value<u64>() != sum.value()) throw std::runtime_error("its records are corrupt (wrong checksum)");

        std::lock_guard lock(replay.mutex());
        Reader from(structure, structure_bytes);
        replay.load_structure(from);
        std::vector<Part> parts;
        list_parts(replay.store(), parts);
        Store& store = replay.writable_store();
        u64 done = 0, told = 0;
        for (const Part& part : parts) {
            each_run(store, part, [&](u32 column, std::size_t size) {
                std::memcpy(store.writable_column(part.chunk, column), records + done, size);
                done += size;
            });
            if (done - told >= PROGRESS_BYTES) progress(record_bytes / 2 + (told = done) / 2, record_bytes);
        }
        progress(record_bytes, record_bytes);
    }

  private:
    static constexpr u64 PROGRESS_BYTES = u64{16} << 20;
    struct Part {
        u32 chunk, records, states;  // used slots: of all columns, of the state columns
    };
    static void list_parts(const Store& store, std::vector<Part>& parts) {
        for (u32 i = store.oldest(); i != NONE; i = store.episode(i).newer) {
            const Episode& episode = store.episode(i);
            for (u32 chunk = episode.first_chunk; chunk != NONE; chunk = store.head(chunk).next) {
                const u32 base = store.head(chunk).base, most = store.chunk_records();
                parts.push_back({chunk, std::min(most, episode.records - base), std::min(most, episode.states() - base)});
            }
        }
    }
    template <class Visit>
    static void each_run(const Store& store, const Part& part, Visit visit) {
        for (u32 c = 0; c < store.column_count(); ++c)
            if (const std::size_t bytes = std::size_t{c < store.state_count() ? part.states : part.records} * store.column_bytes(c)) visit(c, bytes);
    }
    static u64 part_bytes(const Store& store, const Part& part) {
        u64 bytes = 0;
        each_run(store, part, [&](u32, std::size_t run) { bytes += run; });
        return bytes;
    }
    template <class Put>
    static void put_checked(Put& put, const std::vector<byte>& bytes) {
        Checksum sum;
        sum.add(bytes.data(), bytes.size());
        const u64 value = sum.value();
        put(bytes.data(), bytes.size());
        put(&value, sizeof value);
    }
    static void check(Reader& in, const byte* data, std::size_t bytes) {
        Checksum sum;
        sum.add(data, bytes);
        if (in.value<u64>() != sum.value()) throw std::runtime_error("it is corrupt (wrong checksum)");
    }
};

}  // namespace ddrl::replay
