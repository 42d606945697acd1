#include "runtime.h"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#ifdef MSL_THREADS
#include <thread>
#else
#include <sys/mman.h>
#endif

namespace msl {
thread_local Thread* current = nullptr;
MSL_PER_RUN Group* group = nullptr;

static void set_up(Group& g, dim3 groups, dim3 size, dim3 position) {
  static thread_local unsigned groups_so_far = 0;
  unsigned count = size.x * size.y * size.z;
  g.number = ++groups_so_far;
  g.grid = groups;
  g.size = size;
  g.position = position;
  g.simdgroup_count = (count + SIMD - 1) / SIMD;
  g.threads.assign(count, Thread());
  g.simdgroups.reset(new Simdgroup[g.simdgroup_count]());
  g.meeting.size = count;
  g.meeting.arrived = g.meeting.generation = 0;
  for (unsigned i = 0; i < count; ++i) {
    Thread& t = g.threads[i];
    t.index = i;
    t.lane = i % SIMD;
    t.position = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    t.simdgroup = &g.simdgroups[i / SIMD];
    t.simdgroup->meeting.size++;
  }
}

template <class F> static int each_group(dim3 groups, F f) {
  for (unsigned z = 0; z < groups.z; ++z)
    for (unsigned y = 0; y < groups.y; ++y)
      for (unsigned x = 0; x < groups.x; ++x)
        if (f(dim3{x, y, z})) return -1;
  return 0;
}

#ifdef MSL_THREADS
void meet(Meeting& m) {
  std::unique_lock<std::mutex> lock(m.mutex);
  unsigned generation = m.generation;
  if (++m.arrived == m.size) {
    m.arrived = 0;
    m.generation++;
    m.changed.notify_all();
  } else {
    m.changed.wait(lock, [&] { return m.generation != generation; });
  }
}

int run(Body body, void* const* buffers, dim3 groups, dim3 size, unsigned) {
  return each_group(groups, [&](dim3 position) {
    Group g;
    group = &g;
    set_up(g, groups, size, position);
    std::vector<std::thread> threads;
    for (auto& t : g.threads) threads.emplace_back([&] { current = &t; body(buffers); });
    for (auto& t : threads) t.join();
    return 0;
  });
}
#else
constexpr size_t STACK = 256 << 10;
static thread_local std::vector<void*> stacks;
static thread_local void* scheduler;
static thread_local Body fibre_body;
static thread_local void* const* fibre_buffers;

// Keeps the registers that a call must, on the stack that is left; takes them from the other one. System V, x86-64 and AArch64.
extern "C" void msl_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
msl_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
#else
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
msl_switch:
  sub sp, sp, #176
  stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]; stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]; ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
  add sp, sp, #176
  ret
)");
#endif

static void leave() { msl_switch(&current->stack_pointer, scheduler); }

static void fibre() {
  fibre_body(fibre_buffers);
  current->done = true;
  leave();
  std::abort();
}

static void* prepare(void* stack) {
  auto* top = reinterpret_cast<uint64_t*>(static_cast<char*>(stack) + STACK);
#if defined(__x86_64__)
  *--top = 0;  // so that the stack is aligned as after a call
  *--top = reinterpret_cast<uint64_t>(&fibre);
  return std::memset(top - 6, 0, 6 * sizeof *top);
#else
  top -= 22;
  std::memset(top, 0, 176);
  top[11] = reinterpret_cast<uint64_t>(&fibre);
  return top;
#endif
}

void meet(Meeting& m) {
  unsigned generation = m.generation;
  if (++m.arrived == m.size) {
    m.arrived = 0;
    m.generation++;
    return;
  }
  current->waits = &m;
  current->generation = generation;
  leave();
}

// Every third seed is unfair: a simdgroup runs as far as it can before another one moves.
static int run_group(std::mt19937& random, dim3 position, bool unfair) {
  std::vector<unsigned> order(group->threads.size());
  while (stacks.size() < order.size())
    stacks.push_back(mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (unsigned i = 0; i < order.size(); ++i) {
    order[i] = i;
    group->threads[i].stack_pointer = prepare(stacks[i]);
  }
  for (size_t left = order.size(); left;) {
    if (!unfair) std::shuffle(order.begin(), order.end(), random);
    bool moved = false;
    for (unsigned i : order) {
      Thread& t = group->threads[i];
      if (t.done || (t.waits && t.waits->generation == t.generation)) continue;
      t.waits = nullptr;
      current = &t;
      msl_switch(&scheduler, t.stack_pointer);
      moved = true;
      left -= t.done;
      if (unfair && t.lane + 1 == t.simdgroup->meeting.size) break;
    }
    if (!moved) {
      unsigned in_group = 0;
      for (auto& t : group->threads) in_group += !t.done && t.waits == &group->meeting;
      std::fprintf(stderr, "divergence in threadgroup (%u, %u, %u): %zu threads ended, %u wait at threadgroup_barrier, %zu at a simdgroup function\n",
                   position.x, position.y, position.z, order.size() - left, in_group, left - in_group);
      return -1;
    }
  }
  return 0;
}

int run(Body body, void* const* buffers, dim3 groups, dim3 size, unsigned seed) {
  Group g;
  group = &g;
  fibre_body = body;
  fibre_buffers = buffers;
  std::mt19937 random(seed);
  bool unfair = seed % 3 == 1;
  return each_group(groups, [&](dim3 position) {
    set_up(g, groups, size, position);
    return run_group(random, position, unfair);
  });
}
#endif
}  // namespace msl

extern "C" int msl_dispatch(const char* name, void* const* buffers, const unsigned groups[3], unsigned threads, unsigned seed) {
  for (unsigned i = 0; i < msl::kernel_count; ++i)
    if (!std::strcmp(msl::kernels[i].name, name))
      return msl::run(msl::kernels[i].body, buffers, {groups[0], groups[1], groups[2]}, {threads, 1, 1}, seed);
  return -2;
}
