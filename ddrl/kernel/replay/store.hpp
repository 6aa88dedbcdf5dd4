// The records of a replay in chunks, and the table of their episodes. Not thread-safe: the replay locks.
#pragma once

#include <tsl/robin_map.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory.hpp"

namespace ddrl::replay {

enum class Ending : u8 { LIVE = 0, TERMINATED = 1, TRUNCATED = 2, CUT = 3 };  // CUT: closed without a final state

struct Episode {
    u64 handle = 0;
    u32 first_chunk = NONE, last_chunk = NONE;
    u32 records = 0;  // T
    u32 picks = 0;  // positions 0 .. picks - 1 can be drawn
    u32 older = NONE, newer = NONE;  // neighbors in order of handles
    Ending ending = Ending::LIVE;
    u8 used = false;  // a bool, but of any value where a snapshot was made by malice
    u32 states() const { return records + (ending == Ending::TERMINATED || ending == Ending::TRUNCATED); }
};

// What a draw needs of an episode, in a quarter of a cache line.
struct EpisodeView {
    static constexpr u32 TERMINAL = 0x80000000u, DRAWN = 0x80000000u;
    u64 handle;
    u32 records, states;  // TERMINAL set in records: the last state is terminal; DRAWN set in states: a pick was drawn
};

// The table of episodes: by index (reused once an episode was removed), by handle (never reused), and in order of
// handles. Everything is O(1) but save, load and check.
class Episodes {
public:
    const Episode& operator[](u32 index) const { return table_[index]; }
    // For writing; call refresh once records or ending have changed.
    Episode& change(u32 index) { return table_.change(index); }
    void refresh(u32 index) {
        const Episode& episode = table_[index];
        views_[index] = {episode.handle,
                         episode.records | (episode.ending == Ending::TERMINATED ? EpisodeView::TERMINAL : 0),
                         episode.states() | (views_[index].states & EpisodeView::DRAWN)};
    }
    EpisodeView* views() { return views_.data(); }
    // Whether a pick of the episode was drawn since it began; an episode that was loaded counts as drawn.
    bool drawn(u32 index) const { return views_[index].states & EpisodeView::DRAWN; }
    size_t count() const { return by_handle_.size(); }
    size_t table_size() const { return table_.size(); }
    u32 oldest() const { return oldest_; }
    u64 next_handle() const { return next_handle_; }
    u32 find(u64 handle) const {
        const auto at = by_handle_.find(handle);
        return at == by_handle_.end() ? NONE : at->second;
    }
    // Whether episode `index` is still the one with `handle`.
    bool holds(u32 index, u64 handle) const {
        return index < table_.size() && table_[index].used && table_[index].handle == handle;
    }

    u32 begin() {
        u32 index;
        if (unused_.empty()) {
            index = static_cast<u32>(table_.size());
            table_.resize(index + size_t{1});
            views_.emplace_back();
        } else {
            index = unused_.back();
            unused_.pop_back();
        }
        Episode& episode = change(index) = Episode{};
        episode.used = true;
        episode.handle = next_handle_++;
        episode.older = newest_;
        if (newest_ != NONE) change(newest_).newer = index;
        newest_ = index;
        if (oldest_ == NONE) oldest_ = index;
        by_handle_[episode.handle] = index;
        views_[index].states = 0;
        refresh(index);
        return index;
    }
    void remove(u32 index) {
        Episode& episode = change(index);
        (episode.older == NONE ? oldest_ : change(episode.older).newer) = episode.newer;
        (episode.newer == NONE ? newest_ : change(episode.newer).older) = episode.older;
        by_handle_.erase(episode.handle);
        episode.used = false;
        unused_.push_back(index);
    }

    size_t nbytes() const {
        return table_.nbytes() + views_.capacity() * sizeof(EpisodeView) + map_bytes(by_handle_) +
               unused_.capacity() * sizeof(u32);
    }
    // All episodes, or those that changed since mark_saved.
    void save(Writer& out, bool whole) const {
        out.value(next_handle_), out.value(oldest_), out.value(newest_);
        table_.save(out, whole);
    }
    void mark_saved() { table_.clear_written(); }
    void load(Reader& in) {
        next_handle_ = in.value<u64>(), oldest_ = in.value<u32>(), newest_ = in.value<u32>();
        table_.load(in);
        views_.resize(table_.size());
        by_handle_.clear();
        unused_.clear();
        for (u32 i = 0; i < table_.size(); ++i) {
            const Episode& episode = table_[i];
            views_[i].states = EpisodeView::DRAWN;
            refresh(i);
            if (!episode.used) {
                unused_.push_back(i);
                continue;
            }
            fail_if(episode.handle >= next_handle_ || episode.records >= EpisodeView::TERMINAL ||
                        episode.ending > Ending::CUT,
                    "it holds an episode that cannot be");
            by_handle_[episode.handle] = i;
        }
        check();
    }
    // Throws what is wrong with the order of episodes.
    void check() const {
        size_t count = 0;
        u32 before = NONE;
        for (u32 i = oldest_; i != NONE; before = i, i = table_[i].newer, ++count) {
            fail_if(i >= table_.size(), "an episode is not in the table");
            const Episode& episode = table_[i];
            fail_if(!episode.used || find(episode.handle) != i, "an episode is not found by its handle");
            fail_if(episode.older != before || (before != NONE && table_[before].handle >= episode.handle),
                    "the order of handles is broken");
            fail_if(views_[i].handle != episode.handle || (views_[i].states & ~EpisodeView::DRAWN) != episode.states(),
                    "an episode's view is stale");
        }
        fail_if(before != newest_, "the newest episode is wrong");
        fail_if(count != by_handle_.size() || count + unused_.size() != table_.size(), "episodes are lost");
    }

private:
    TrackedVector<Episode> table_;
    std::vector<EpisodeView> views_;
    std::vector<u32> unused_;
    tsl::robin_map<u64, u32, MixedHash> by_handle_;
    u64 next_handle_ = 0;
    u32 oldest_ = NONE, newest_ = NONE;
};

// The records: episodes by handle, each a chain of fixed-size chunks, and in a chunk one run of memory for each column.
//
//   slot = chunk * C + offset            names one record for as long as its episode lives; C is a power of two
//   chunk = [column 0 x C | column 1 x C | ..]        the columns of role STATE come first
//
// So the consecutive records of a window are adjacent column by column, within one page or two. An episode of T records
// with a final state uses T + 1 slots: the final state is in slot T. Records are written once and never change; a chunk
// is freed as a whole. What a reader copies outside the lock (chunk memory, heads of used chunks) never moves.

struct ChunkHead {
    u32 episode = NONE, base = 0, next = NONE, previous = NONE;  // base: position of the chunk's first record
};

// When a column is given back with a draw (ddrl.core.specs.ColumnRole).
enum class Role : u8 {
    STATE = 0,  // also of final states; given at both ends of a transition
    STEP = 1,  // one a record
    MEMORY = 2,  // given at the first record of a window
    REWARD = 3,  // float32 numbers; summed over n steps
};

// One column of the records. `stack`: how many consecutive states make one observation (role STATE).
struct Column {
    u32 bytes;
    Role role = Role::STEP;
    u32 stack = 1;
};
using Columns = std::vector<Column>;  // those of role STATE come first

inline constexpr size_t MAX_COLUMNS = 64;

// The columns of incoming records: record i of column c is at data[c] + i * stride[c].
struct Rows {
    const byte* const* data;
    const size_t* stride;
    u32 count;
};

// Copies of a few bytes without a call: most columns are 4 to 64 bytes.
inline void copy_record(byte* to, const byte* from, size_t bytes) {
    switch (bytes) {
        case 4: std::memcpy(to, from, 4); return;
        case 8: std::memcpy(to, from, 8); return;
        case 16: std::memcpy(to, from, 16); return;
        case 32: std::memcpy(to, from, 32); return;
        case 64: std::memcpy(to, from, 64); return;
        default: std::memcpy(to, from, bytes);
    }
}

// Addresses of chunks, for loops.
struct Chunks {
    const byte* base;
    size_t bytes;
    const byte* operator[](size_t chunk) const { return base + chunk * bytes; }
};

class Store {
public:
    Store(const Columns& columns, u64 capacity, u32 shift, const std::string& file)
        : columns_(columns),
          state_count_(count_states(columns)),
          shift_(shift),
          chunk_bytes_(place_columns()),
          arena_(chunk_bytes_, chunks_for(capacity, shift, chunk_bytes_), file),
          heads_(arena_.max_chunks()),
          grown_(arena_.max_chunks()) {}

    u32 chunk_records() const { return u32{1} << shift_; }
    u32 shift() const { return shift_; }
    size_t max_slots() const { return arena_.max_chunks() << shift_; }
    u32 column_count() const { return static_cast<u32>(columns_.size()); }
    u32 state_count() const { return state_count_; }
    u32 column_bytes(u32 column) const { return columns_[column].bytes; }
    Role column_role(u32 column) const { return columns_[column].role; }
    u32 column_stack(u32 column) const { return columns_[column].stack; }
    const ChunkHead& head(u32 chunk) const { return heads_[chunk]; }
    u64 records() const { return records_; }
    const Episodes& episodes() const { return episodes_; }
    EpisodeView* episode_views() { return episodes_.views(); }
    const Episode& episode(u32 index) const { return episodes_[index]; }
    void set_picks(u32 index, u32 picks) { episodes_.change(index).picks = picks; }
    u32 oldest() const { return episodes_.oldest(); }
    u32 find(u64 handle) const { return episodes_.find(handle); }
    const byte* column(u32 chunk, u32 column) const { return arena_.chunk(chunk) + offset_[column]; }
    Chunks chunks() const { return {arena_.base(), arena_.chunk_bytes()}; }
    const byte* chunk(u32 chunk) const { return arena_.chunk(chunk); }
    size_t column_offset(u32 column) const { return offset_[column]; }
    u32 position(u32 slot) const { return heads_[slot >> shift_].base + (slot & (chunk_records() - 1)); }
    u32 episode_of(u32 slot) const { return heads_[slot >> shift_].episode; }

    const ChunkHead* heads() const { return heads_.data(); }

    // The chunk that holds a position of an episode. O(1).
    u32 chunk_at(u32 index, u32 position) const { return chunks_[index][position >> shift_]; }

    // Whether a chunk is free.
    bool has_room() const { return !free_.empty() || fresh_ < arena_.max_chunks(); }

    u32 begin_episode() {
        const u32 index = episodes_.begin();
        if (chunks_.size() <= index) chunks_.resize(index + size_t{1});
        chunks_[index].clear();
        return index;
    }

    // Appends up to `rows.count` records from record `first` on, as many as fit the last chunk (a new one when it is
    // full); returns how many.
    u32 append(u32 index, const Rows& rows, u32 first) {
        const u32 offset = place_next(index);
        Episode& episode = episodes_.change(index);
        const u32 room = chunk_records() - offset, count = rows.count - first < room ? rows.count - first : room;
        byte* chunk = arena_.chunk(episode.last_chunk);
        note_growth(episode.last_chunk);
        for (u32 c = 0; c < column_count(); ++c) {
            const size_t bytes = columns_[c].bytes, stride = rows.stride[c];
            byte* to = chunk + offset_[c] + offset * bytes;
            const byte* from = rows.data[c] + first * stride;
            if (count == 1)
                copy_record(to, from, bytes);
            else if (stride == bytes)
                std::memcpy(to, from, count * bytes);
            else
                for (u32 i = 0; i < count; ++i) copy_record(to + i * bytes, from + i * stride, bytes);
        }
        episode.records += count;
        records_ += count;
        episodes_.refresh(index);
        return count;
    }

    // Ends an episode; `state` holds one pointer per state column, or is null when ending is CUT.
    void finish(u32 index, Ending ending, const byte* const* state) {
        if (state) {
            const u32 offset = place_next(index);
            byte* chunk = arena_.chunk(episodes_[index].last_chunk);
            note_growth(episodes_[index].last_chunk);
            for (u32 c = 0; c < state_count_; ++c)
                std::memcpy(chunk + offset_[c] + offset * columns_[c].bytes, state[c], columns_[c].bytes);
        }
        episodes_.change(index).ending = ending;
        episodes_.refresh(index);
    }

    // Takes an episode out; `recycle` is called with each of its chunks, which `give_back` makes usable again.
    // O(chunks).
    template <class Recycle>
    void remove(u32 index, Recycle recycle) {
        const Episode& episode = episodes_[index];
        for (u32 chunk = episode.first_chunk; chunk != NONE;) {
            const u32 next = heads_[chunk].next;
            recycle(chunk);
            chunk = next;
        }
        records_ -= episode.records;
        episodes_.remove(index);
    }
    void give_back(u32 chunk) { free_.push_back(chunk); }

    size_t nbytes() const {
        return fresh_ * (arena_.chunk_bytes() + sizeof(ChunkHead) + sizeof(Growth) + sizeof(u32)) + episodes_.nbytes() +
               chunks_.capacity() * sizeof(std::vector<u32>) + (free_.capacity() + growing_.capacity()) * sizeof(u32);
    }
    u32 chunks_touched() const { return fresh_; }
    bool in_file() const { return arena_.in_file(); }

    // Whether a chunk belongs to an episode now (a chunk given back keeps its last head).
    bool in_use(u32 chunk) const {
        if (chunk >= fresh_) return false;
        const u32 index = heads_[chunk].episode, number = heads_[chunk].base >> shift_;
        return index < episodes_.table_size() && episodes_[index].used && number < chunks_[index].size() &&
               chunks_[index][number] == chunk;
    }
    // Chunks that hold slots which no snapshot holds yet (or, `whole`, any), as visit(chunk, first new slot, records,
    // states).
    template <class Visit>
    void each_new(bool whole, Visit visit) const {
        const auto visit_chunk = [&](u32 chunk) {
            const Episode& episode = episodes_[heads_[chunk].episode];
            const u32 base = heads_[chunk].base, first = whole ? 0 : grown_[chunk].saved;
            visit(chunk, first, std::min(chunk_records(), episode.records - base),
                  std::min(chunk_records(), episode.states() - base));
        };
        if (!whole) {
            for (const u32 chunk : growing_)
                if (grown_[chunk].growing && in_use(chunk)) visit_chunk(chunk);
            return;
        }
        for (u32 i = oldest(); i != NONE; i = episodes_[i].newer)
            for (u32 chunk = episodes_[i].first_chunk; chunk != NONE; chunk = heads_[chunk].next) visit_chunk(chunk);
    }
    // Everything counts as saved.
    void mark_saved() {
        for (const u32 chunk : growing_) {
            if (in_use(chunk)) grown_[chunk].saved = episodes_[heads_[chunk].episode].states() - heads_[chunk].base;
            grown_[chunk].saved = std::min(grown_[chunk].saved, chunk_records());
            grown_[chunk].growing = 0;
        }
        growing_.clear();
        heads_.clear_written();
        episodes_.mark_saved();
    }

    // Everything but the records: all of it, or what was written since mark_saved. Which chunks are free follows from
    // those in use.
    void save(Writer& out, bool whole) const {
        out.value(records_), out.value(fresh_);
        episodes_.save(out, whole);
        heads_.save(out, fresh_, whole);
    }
    void load(Reader& in) {
        records_ = in.value<u64>();
        const u32 before = fresh_, fresh = in.value<u32>();
        fail_if(fresh > arena_.max_chunks() || (fresh > before && fresh - before > in.left() / sizeof(ChunkHead)),
                "it holds more than this replay can");
        episodes_.load(in);
        fail_if(heads_.load(in) != fresh, "its chunks are miscounted");
        arena_.commit(fresh);
        fresh_ = fresh;
        chunks_.assign(episodes_.table_size(), {});
        free_.clear(), growing_.clear(), grown_.clear();
        std::vector<bool> taken(fresh_);
        for (u32 i = oldest(); i != NONE; i = episodes_[i].newer)
            for (u32 chunk = episodes_[i].first_chunk; chunk != NONE; chunk = heads_[chunk].next) {
                fail_if(chunk >= fresh_ || taken[chunk], "a chain of chunks is broken");
                chunks_[i].push_back(chunk), note_growth(chunk);
                taken[chunk] = true;
            }
        check();
        for (u32 chunk = fresh_; chunk-- > 0;)
            if (!taken[chunk]) free_.push_back(chunk);
    }
    byte* writable_column(u32 chunk, u32 column) { return arena_.chunk(chunk) + offset_[column]; }

    // Throws what is wrong with the structure. O(everything).
    void check() const {
        episodes_.check();
        u64 records = 0;
        size_t chunks = free_.size();
        for (u32 i = oldest(); i != NONE; i = episodes_[i].newer) {
            const Episode& episode = episodes_[i];
            records += episode.records;
            u32 base = 0, previous = NONE;
            for (u32 chunk = episode.first_chunk; chunk != NONE;
                 previous = chunk, chunk = heads_[chunk].next, base += chunk_records(), ++chunks) {
                const ChunkHead& head = heads_[chunk];
                fail_if(head.episode != i || head.base != base || head.previous != previous,
                        "a chain of chunks is broken");
            }
            fail_if(chunks_[i].size() << shift_ != base, "an episode's list of chunks is wrong");
            fail_if(previous != episode.last_chunk, "an episode's last chunk is wrong");
            fail_if(base < episode.states() || (base && base - chunk_records() >= episode.states()),
                    "a chain of chunks has the wrong length");
        }
        fail_if(records != records_, "records are miscounted");
        fail_if(chunks > fresh_, "a chunk is in use twice");
    }

private:
    struct Growth {
        u32 saved, growing;
    };
    void note_growth(u32 chunk) {
        if (!grown_[chunk].growing) grown_[chunk].growing = 1, growing_.push_back(chunk);
    }
    static u32 count_states(const Columns& columns) {
        u32 states = 0;
        for (size_t c = 0; c < columns.size(); ++c) {
            if (columns[c].role == Role::STATE && states++ != c)
                throw std::invalid_argument("the columns of role STATE come first");
            if (columns[c].role == Role::REWARD && columns[c].bytes % sizeof(float))
                throw std::invalid_argument("a column of role REWARD holds float32 numbers");
        }
        if (!states || columns.size() > MAX_COLUMNS)
            throw std::invalid_argument("a record has a state, and at most " + std::to_string(MAX_COLUMNS) +
                                        " columns");
        return states;
    }
    static size_t chunks_for(u64 capacity, u32 shift, size_t chunk_bytes) {
        // Enough for episodes of two records each, within 32-bit slots and half a TiB (or four times the records' own
        // size): beyond that episodes are evicted for want of chunks.
        const u64 records = u64{1} << shift, full = (capacity + records) / records + 1;
        u64 most = capacity / 2 + 64;
        const u64 bytes = std::max<u64>((u64{1} << 39) / chunk_bytes, 4 * full);
        most = std::min({std::max(most, 4 * full), bytes, (u64{NONE} >> shift)});
        return std::max<u64>(most, full + 64);
    }
    size_t place_columns() {
        size_t at = 0;
        for (const Column& column : columns_) {
            offset_.push_back(at);
            at = round_up(at + (size_t{column.bytes} << shift_), 64);
        }
        return at;
    }
    // Offset in the last chunk for the episode's next slot; takes a chunk when there is none or it is full.
    u32 place_next(u32 index) {
        const u32 offset = episodes_[index].records & (chunk_records() - 1);
        if (offset == 0) {
            u32 chunk;
            if (free_.empty()) {
                arena_.commit(fresh_ + size_t{1});
                chunk = fresh_++;
            } else {
                chunk = free_.back();
                free_.pop_back();
            }
            Episode& episode = episodes_.change(index);
            heads_.set(chunk, {index, episode.records, NONE, episode.last_chunk});
            grown_[chunk].saved = 0;
            (episode.last_chunk == NONE ? episode.first_chunk : heads_.change(episode.last_chunk).next) = chunk;
            episode.last_chunk = chunk;
            chunks_[index].push_back(chunk);
        }
        return offset;
    }
    Columns columns_;
    u32 state_count_, shift_;
    std::vector<size_t> offset_;
    size_t chunk_bytes_;
    Arena arena_;
    Tracked<ChunkHead> heads_;
    Reserved<Growth> grown_;  // of each chunk, since the last snapshot
    std::vector<u32> growing_;  // chunks with slots that no snapshot holds
    std::vector<u32> free_;
    u32 fresh_ = 0;  // chunks ever taken: 0 .. fresh_ - 1
    Episodes episodes_;
    std::vector<std::vector<u32>> chunks_;  // of each episode, in order
    u64 records_ = 0;
};

}  // namespace ddrl::replay
