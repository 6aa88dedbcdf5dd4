// Snapshots: one consistent moment of a replay as bytes, whole or as what changed since the last one, and back.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../checksum.hpp"
#include "replay.hpp"

namespace ddrl::replay {

// Writes a snapshot into a file, through a buffer; `finish` returns once it is on the disk.
class FileSink {
public:
    explicit FileSink(const std::string& path) : file_(std::fopen(path.c_str(), "wbe")) {
        if (!file_) fail();
        std::setvbuf(file_, nullptr, _IOFBF, size_t{1} << 20);
    }
    FileSink(const FileSink&) = delete;
    ~FileSink() {
        if (file_) std::fclose(file_);
    }
    void begin(size_t) {}
    void put(const void* data, size_t bytes) {
        if (std::fwrite(data, 1, bytes, file_) != bytes) fail();
    }
    void finish() {
        if (std::fflush(file_) || fsync(fileno(file_)) || std::fclose(std::exchange(file_, nullptr))) fail();
    }

private:
    [[noreturn]] static void fail() {
        throw std::runtime_error("it cannot be written (" + std::string(std::strerror(errno)) + ")");
    }
    std::FILE* file_;
};

//   "DDRLRPL5" | u32 length of the configuration | the configuration (JSON) | u64 id | u64 id of the snapshot it builds
//   on (0: whole) | u64 bytes of structure | u64 bytes of records | u64 checksum of all that | structure | its checksum
//   | records | their checksum
//
// The structure (episodes, picks, selectors, eviction, streams) is copied under the lock; the records are then written
// without it, while recording continues: records never change, and chunks of evicted episodes are kept until the
// snapshot is written. An increment holds the blocks of the structure that were written since the last one, and the new
// records: its cost is that of the new data (and of the list of episodes). Reading checks everything first, the
// checksums and then the structure: input that is truncated, corrupt, malicious, of another configuration or out of
// order changes nothing.
inline constexpr char SNAPSHOT_MAGIC[8] = {'D', 'D', 'R', 'L', 'R', 'P', 'L', '5'};

// COPY leaves the chain of increments alone; WHOLE begins one; INCREMENT continues it.
enum class SnapshotKind { COPY, WHOLE, INCREMENT };

class Snapshot {
public:
    // Writes through sink.begin(all bytes) and sink.put(data, bytes); progress(done, total) is called with the bytes of
    // records now and then.
    template <class Sink, class Progress>
    static void write(Replay& replay, const std::string& configuration, SnapshotKind kind, Sink& sink,
                      Progress progress) {
        Writer structure;
        std::vector<Part> parts;
        u64 ticket, id, parent = 0;
        {
            std::lock_guard lock(replay.mutex());
            const bool whole = kind != SnapshotKind::INCREMENT;
            fail_if(!whole && !(parent = replay.last_snapshot),
                    "there is no snapshot to build on: save a whole one first");
            replay.save_structure(structure, whole);
            replay.store().each_new(whole, [&](u32 chunk, u32 first, u32 records, u32 states) {
                parts.push_back({chunk, first, records, states});
            });
            structure.array(parts.data(), parts.size());
            Checksum sum;
            sum.add(&parent, sizeof parent);
            sum.add(structure.bytes().data(), structure.bytes().size());
            id = sum.value() | 1;
            if (kind != SnapshotKind::COPY) replay.mark_saved(), replay.last_snapshot = id;
            ticket = replay.enter();
        }
        Held held{replay, ticket, kind != SnapshotKind::COPY};
        const Store& store = replay.store();
        u64 total = 0;
        for (const Part& part : parts) total += part_bytes(store, part);
        Writer head;
        head.raw(SNAPSHOT_MAGIC, sizeof SNAPSHOT_MAGIC);
        head.value(static_cast<u32>(configuration.size()));
        head.raw(configuration.data(), configuration.size());
        head.value(id), head.value(parent);
        head.value<u64>(structure.bytes().size()), head.value(total);
        sink.begin(head.bytes().size() + structure.bytes().size() + total + 3 * sizeof(u64));
        put_checked(sink, head.bytes());
        put_checked(sink, structure.bytes());
        Checksum sum;
        u64 done = 0, reported = 0;
        for (const Part& part : parts) {
            each_run(store, part, [&](u32 column, size_t offset, size_t bytes) {
                const byte* from = store.column(part.chunk, column) + offset;
                sum.add(from, bytes);
                sink.put(from, bytes);
                done += bytes;
            });
            if (done - reported >= PROGRESS_BYTES) progress(reported = done, total);
        }
        const u64 value = sum.value();
        sink.put(&value, sizeof value);
        sink.finish();
        progress(total, total);
        held.failed = false;
    }

    // Puts the replay into the state that a whole snapshot and the increments after it hold, given in order. Throws
    // std::runtime_error, with nothing changed, where they cannot be used.
    template <class Progress>
    static void read(Replay& replay, const std::string& configuration, std::span<const std::span<const byte>> sources,
                     Progress progress) {
        u64 total = 0, done = 0, reported = 0;
        for (const auto source : sources) total += 2 * source.size();
        const auto report = [&](u64 more) {
            done += more;
            if (done - reported >= PROGRESS_BYTES) progress(reported = done, total);
        };
        std::vector<Opened> opened;
        for (const auto source : sources)
            opened.push_back(open(source, configuration, opened.empty() ? 0 : opened.back().id, report));

        std::lock_guard lock(replay.mutex());
        replay.wait_for_readers();
        Store& store = replay.writable_store();
        Writer former;
        replay.save_structure(former, true);
        std::vector<std::vector<Part>> parts;
        try {
            for (const Opened& file : opened) parts.push_back(load_structure(replay, file));
        } catch (...) {  // correct checksums of an impossible structure: no record has been changed
            Reader back(former.bytes().data(), former.bytes().size());
            replay.load_structure(back);
            throw;
        }
        for (size_t i = 0; i < opened.size(); ++i) {
            const byte* records = opened[i].records;
            for (const Part& part : parts[i])
                each_run(store, part, [&](u32 column, size_t offset, size_t size) {
                    std::memcpy(store.writable_column(part.chunk, column) + offset, records, size);
                    records += size;
                    report(size);
                });
        }
        replay.mark_saved();
        replay.last_snapshot = opened.back().id;
        progress(total, total);
    }

private:
    static constexpr u64 PROGRESS_BYTES = u64{16} << 20;
    struct Part {
        u32 chunk, first, records,
            states;  // slots first .. states - 1 of the state columns, first .. records - 1 of the others
    };
    struct Opened {
        u64 id;
        const byte *structure, *records;
        u64 structure_bytes, record_bytes;
    };
    // Holds chunks while they are written; a snapshot that failed cannot be built on.
    struct Held {
        Replay& replay;
        u64 ticket;
        bool failed;
        ~Held() {
            std::lock_guard lock(replay.mutex());
            replay.leave(ticket);
            if (failed) replay.last_snapshot = 0;
        }
    };

    template <class Report>
    static Opened open(std::span<const byte> source, const std::string& configuration, u64 parent, Report report) {
        Reader in(source.data(), source.size());
        fail_if(in.left() < 12 || std::memcmp(source.data(), SNAPSHOT_MAGIC, 7) != 0,
                "it is not a snapshot of a ddrl replay");
        fail_if(
            std::memcmp(in.take(8), SNAPSHOT_MAGIC, 8) != 0,
            "another version of ddrl wrote it: resume it with that one, or let a new run begin with its networks by "
            "--set learner.init=RUN");
        const u32 length = in.value<u32>();
        const std::string other(reinterpret_cast<const char*>(in.take(length)), length);
        Opened file{};
        file.id = in.value<u64>();
        const u64 built_on = in.value<u64>();
        file.structure_bytes = in.value<u64>();
        file.record_bytes = in.value<u64>();
        check(in, source.data(), source.size() - in.left());
        if (other != configuration)
            throw std::runtime_error("it was written by a replay of another configuration: " + other +
                                     "; this one is " + configuration);
        if (built_on != parent)
            throw std::runtime_error(parent ? "it does not build on the snapshot before it"
                                            : "it is an increment: load the whole snapshot it builds on first");
        fail_if(in.left() != file.structure_bytes + file.record_bytes + 2 * sizeof(u64), "it is truncated");
        file.structure = in.take(file.structure_bytes);
        check(in, file.structure, file.structure_bytes);
        file.records = in.take(file.record_bytes);
        Checksum sum;
        for (u64 done = 0; done < file.record_bytes; done += PROGRESS_BYTES) {
            const u64 part = std::min<u64>(PROGRESS_BYTES, file.record_bytes - done);
            sum.add(file.records + done, part);
            report(part);
        }
        fail_if(in.value<u64>() != sum.value(), "its records are corrupt (wrong checksum)");
        return file;
    }
    // Loads the structure into the replay and returns the parts of the records. What a valid snapshot cannot hold is
    // refused although its checksums are correct: checksums do not prevent deliberate changes.
    static std::vector<Part> load_structure(Replay& replay, const Opened& file) {
        Reader from(file.structure, file.structure_bytes);
        replay.load_structure(from);
        replay.check_structure();
        std::vector<Part> parts(from.count(sizeof(Part)));
        u64 bytes = 0;
        const Store& store = replay.store();
        for (Part& part : parts) {
            part = from.value<Part>();
            fail_if(part.chunk >= store.chunks_touched() || part.records > store.chunk_records() ||
                        part.states > store.chunk_records(),
                    "it holds records outside of every chunk");
            bytes += part_bytes(store, part);
        }
        fail_if(bytes != file.record_bytes || from.left(), "its records are miscounted");
        return parts;
    }
    template <class Visit>
    static void each_run(const Store& store, const Part& part, Visit visit) {
        for (u32 c = 0; c < store.column_count(); ++c) {
            const size_t end = c < store.state_count() ? part.states : part.records, bytes = store.column_bytes(c);
            if (end > part.first) visit(c, part.first * bytes, (end - part.first) * bytes);
        }
    }
    static u64 part_bytes(const Store& store, const Part& part) {
        u64 bytes = 0;
        each_run(store, part, [&](u32, size_t, size_t run) { bytes += run; });
        return bytes;
    }
    template <class Sink>
    static void put_checked(Sink& sink, const std::vector<byte>& bytes) {
        const u64 value = checksum(bytes.data(), bytes.size());
        sink.put(bytes.data(), bytes.size());
        sink.put(&value, sizeof value);
    }
    static void check(Reader& in, const byte* data, size_t bytes) {
        fail_if(in.value<u64>() != checksum(data, bytes), "it is corrupt (wrong checksum)");
    }
};

}  // namespace ddrl::replay
