// Work on several threads at once.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace kvmosaic {

// `wanted`, or as many as the machine has for 0 and less; at least 1.
inline int32_t thread_count(int32_t wanted) {
    return wanted > 0 ? wanted : std::max(1, int32_t(std::thread::hardware_concurrency()));
}

// Calls work(i) for 0 <= i < threads, each on a thread of its own; work(0) on this one.
template <class Work>
void on_threads(int32_t threads, const Work& work) {
    std::vector<std::thread> others;
    for (int32_t i = 1; i < threads; ++i)
        others.emplace_back([&work, i] { work(i); });
    work(0);
    for (std::thread& t : others)
        t.join();
}

// Calls f(i) for 0 <= i < n, whichever thread is free taking the next.
template <class F>
void parallel(int32_t threads, size_t n, const F& f) {
    std::atomic<size_t> next{0};
    on_threads(int32_t(std::min<size_t>(size_t(std::max(threads, 1)), std::max<size_t>(n, 1))), [&](int32_t) {
        for (size_t i = next++; i < n; i = next++)
            f(i);
    });
}

} // namespace kvmosaic
