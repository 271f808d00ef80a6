// Kept prefixes: sequences as they were at some row, found again by the content of their tokens. Sealed pages are
// shared by reference, tail and statistics are copied when somebody writes to them, so a sequence that begins from a
// prefix is to the byte what it would be had it read the tokens itself.
#include <algorithm>
#include <set>

#include "cache/impl.h"

namespace kvmosaic {

uint64_t prefix_hash(std::span<const int32_t> tokens, uint64_t before) {
    return fnv1a(tokens.data(), tokens.size_bytes(), before ? before : kFnvStart);
}

bool Cache::Impl::evict_prefix() {
    auto oldest = prefixes.end();
    for (auto it = prefixes.begin(); it != prefixes.end(); ++it)
        if (!it->second.referenced() && (oldest == prefixes.end() || it->second.last_use < oldest->second.last_use))
            oldest = it;
    if (oldest == prefixes.end()) return false;
    drop_sequence(oldest->second.state);
    prefixes.erase(oldest);
    return true;
}

// What prefixes hold that no sequence uses, themselves or through a prefix that grew from them.
int64_t Cache::Impl::evictable() const {
    std::set<const PrefixUse*> used;
    for (const auto& [id, seq] : sequences)
        used.insert(seq->origin.get());
    for (bool more = true; more;) {
        more = false;
        for (const auto& [hash, prefix] : prefixes)
            if (used.count(prefix.use.get())) more = used.insert(prefix.state->origin.get()).second || more;
    }
    std::map<const Page*, uint32_t> holders;
    for (const auto& [hash, prefix] : prefixes) {
        if (used.count(prefix.use.get())) continue;
        for (const SideState& side : prefix.state->sides) {
            ++holders[side.front], ++holders[side.pins];
            for (const Slot& slot : side.slots)
                ++holders[slot.raw], ++holders[slot.packed];
        }
    }
    int64_t bytes = 0;
    for (const auto& [page, n] : holders)
        if (page && page->refs.load() == n) bytes += page->block;
    return bytes;
}

Prefix* Cache::Impl::longest_prefix(std::span<const int32_t> tokens, int64_t* rows) {
    Prefix* best = nullptr;
    *rows = 0;
    uint64_t hash = kFnvStart;
    for (size_t n = 1; n <= tokens.size() && !prefixes.empty(); ++n) {
        hash = prefix_hash(tokens.subspan(n - 1, 1), hash);
        const auto [first, last] = prefixes.equal_range(hash);
        for (auto it = first; it != last; ++it) // equal hashes are not yet equal tokens
            if (it->second.tokens.size() == n &&
                std::equal(tokens.begin(), tokens.begin() + int64_t(n), it->second.tokens.begin()))
                best = &it->second, *rows = int64_t(n);
    }
    return best;
}

Status Cache::keep_prefix(SeqId seq, std::span<const int32_t> tokens) {
    Impl& im = *impl_;
    im.end_step();
    const auto it = im.sequences.find(seq);
    if (it == im.sequences.end())
        return {StatusCode::not_found, "keep_prefix: there is no sequence " + std::to_string(seq)};
    if (int64_t(tokens.size()) != it->second->rows() || tokens.empty())
        return {StatusCode::invalid_argument, "keep_prefix: " + std::to_string(tokens.size()) +
                                                  " tokens named for sequence " + std::to_string(seq) + ", which has " +
                                                  std::to_string(it->second->rows()) + " rows"};
    int64_t rows = 0;
    if (Prefix* known = im.longest_prefix(tokens, &rows); known && rows == int64_t(tokens.size())) {
        known->last_use = ++im.clock;
        return {};
    }
    Prefix prefix;
    prefix.tokens.assign(tokens.begin(), tokens.end());
    prefix.state = Impl::clone(*it->second);
    prefix.use = std::make_shared<const PrefixUse>();
    prefix.last_use = ++im.clock;
    it->second->origin = prefix.use; // names of one sequence share it; what it had before is held by the prefix
    im.prefixes.emplace(prefix_hash(tokens), std::move(prefix));
    return {};
}

int64_t Cache::find_prefix(std::span<const int32_t> tokens) const {
    int64_t rows = 0;
    impl_->longest_prefix(tokens, &rows);
    return rows;
}

int64_t Cache::take_prefix(SeqId seq, std::span<const int32_t> tokens) {
    Impl& im = *impl_;
    im.end_step();
    int64_t rows = 0;
    Prefix* found = im.longest_prefix(tokens, &rows);
    if (!found) return 0;
    found->last_use = ++im.clock;
    auto fresh = Impl::clone(*found->state);
    fresh->origin = found->use;
    remove(seq);
    im.sequences[seq] = std::move(fresh);
    return rows;
}

int64_t Cache::drop_prefixes() {
    impl_->end_step();
    int64_t dropped = 0;
    while (impl_->evict_prefix())
        ++dropped;
    return dropped;
}

std::vector<PrefixInfo> Cache::prefixes() const {
    std::vector<PrefixInfo> list;
    for (const auto& [hash, prefix] : impl_->prefixes)
        list.push_back({int64_t(prefix.tokens.size()), hash, prefix.referenced()});
    return list;
}

} // namespace kvmosaic
