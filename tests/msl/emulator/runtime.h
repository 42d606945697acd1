// Runs the threads of a threadgroup: as fibres of one thread, in an order shuffled by a seed, or, with -DMSL_THREADS, as threads
// of the system, so that ThreadSanitizer sees races. One threadgroup after the other.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>
#ifdef MSL_THREADS
#include <condition_variable>
#include <mutex>
#define MSL_PER_RUN
#define MSL_LOCK std::mutex mutex; std::condition_variable changed;
#else
#define MSL_PER_RUN thread_local
#define MSL_LOCK
#endif
// An array in threadgroup memory. A new threadgroup finds it full of ones (NaN, or the largest number).
#define MSL_SHARED static MSL_PER_RUN
#ifdef MSL_THREADS
#define MSL_POISON(NAME)
#else
#define MSL_POISON(NAME) \
  { static MSL_PER_RUN unsigned poisoned_for = 0; \
    if (poisoned_for != msl::group->number) { poisoned_for = msl::group->number; std::memset((void*)NAME, 0xFF, sizeof NAME); } }
#endif

namespace msl {

struct dim3 { unsigned x = 1, y = 1, z = 1; };
constexpr unsigned SIMD = 32;

// Where `size` threads meet; `generation` counts the meetings.
struct Meeting { MSL_LOCK unsigned size = 0, arrived = 0, generation = 0; };

// A simdgroup's lanes hand values to each other through slots: two sets, so that a fast lane's next value does not overwrite
// what a slow one still reads.
struct Simdgroup { Meeting meeting; alignas(64) unsigned char slots[2][SIMD][64]; };

struct Thread {
  unsigned index = 0, lane = 0, exchanges = 0;
  dim3 position;
  Simdgroup* simdgroup = nullptr;
  // Fibres: what it waits for, if it does.
  const Meeting* waits = nullptr;
  unsigned generation = 0;
  bool done = false;
  void* stack_pointer = nullptr;
};

struct Group {
  dim3 grid, size, position;
  // Of all that this thread has run; never 0.
  unsigned number = 0;
  Meeting meeting;
  std::vector<Thread> threads;
  std::unique_ptr<Simdgroup[]> simdgroups;
  unsigned simdgroup_count = 0;
};

extern thread_local Thread* current;
extern MSL_PER_RUN Group* group;

void meet(Meeting& meeting);
inline void group_barrier() { meet(group->meeting); }
inline void simd_barrier() { meet(current->simdgroup->meeting); }

// The values of all lanes; a lane past the end of the simdgroup has what was there before.
template <class T> inline const T* exchange(T value, unsigned& lanes) {
  static_assert(sizeof(T) <= 64);
  Simdgroup* s = current->simdgroup;
  lanes = s->meeting.size;
  auto* slots = s->slots[current->exchanges++ & 1];
  // Packed at the start of the set, so that the reader has an array.
  std::memcpy(&slots[0][0] + current->lane * sizeof(T), &value, sizeof(T));
  simd_barrier();
  return reinterpret_cast<const T*>(&slots[0][0]);
}

// Calls `body` for every thread of every threadgroup; -1 if some threads waited where others did not come.
using Body = void (*)(void* const* buffers);
int run(Body body, void* const* buffers, dim3 groups, dim3 size, unsigned seed);

struct Kernel { const char* name; Body body; };
// Defined by what the translator appends.
extern const Kernel kernels[];
extern const unsigned kernel_count;

// A buffer as whatever pointer or reference the kernel declares.
struct Pointer { void* p; template <class T> operator T*() const { return static_cast<T*>(p); } };
struct Reference { void* p; template <class T> operator T&() const { return *static_cast<T*>(p); } };
}  // namespace msl

extern "C" int msl_dispatch(const char* name, void* const* buffers, const unsigned groups[3], unsigned threads, unsigned seed);
