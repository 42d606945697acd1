// Runs recorded dispatches again, with a sanitizer or over a mutant of the kernel, and holds the results to the recorded bits.
// usage: replay FILE SEEDS. Exit 1: other results; 3: divergence; a sanitizer's own code: its report.
#include "runtime.h"
#include <cstdio>
#include <cstdlib>
#include <string>

static std::vector<char> all;
static size_t at;

template <class T> static T take() {
  T x;
  std::memcpy(&x, &all[at], sizeof x);
  at += sizeof x;
  return x;
}

struct Buffer { uint64_t bytes, offset; bool written; const char *before, *after; };

int main(int, char** arguments) {
  FILE* file = std::fopen(arguments[1], "rb");
  for (int c; (c = std::fgetc(file)) != EOF;) all.push_back(char(c));
  std::fclose(file);
  const unsigned seeds = unsigned(std::atoi(arguments[2]));
  int failed = 0;
  while (at < all.size()) {
    std::string name(&all[at + 4], take<uint32_t>());
    at += name.size();
    unsigned groups[3] = {take<uint32_t>(), take<uint32_t>(), take<uint32_t>()}, threads = take<uint32_t>();
    std::vector<Buffer> buffers(take<uint32_t>());
    for (auto& b : buffers) {
      b.bytes = take<uint64_t>();
      b.offset = take<uint64_t>();
      b.written = take<uint32_t>();
      b.before = &all[at];
      at += b.bytes;
      b.after = b.written ? &all[at] : nullptr;
      at += b.written ? b.bytes : 0;
    }
    for (unsigned seed = 0; seed < seeds; ++seed) {
      std::vector<void*> memory, pointers;
      for (auto& b : buffers) {
        // Of its very size, so that AddressSanitizer knows its end.
        void* p = std::malloc(b.bytes);
        std::memcpy(p, b.before, b.bytes);
        memory.push_back(p);
        pointers.push_back(static_cast<char*>(p) + b.offset);
      }
      if (msl_dispatch(name.c_str(), pointers.data(), groups, threads, seed)) return 3;
      for (size_t i = 0; i < buffers.size(); ++i) {
        if (buffers[i].written && std::memcmp(memory[i], buffers[i].after, buffers[i].bytes)) {
          std::fprintf(stderr, "%s: buffer %zu has other bits with seed %u\n", name.c_str(), i, seed);
          failed = 1;
        }
        std::free(memory[i]);
      }
    }
  }
  return failed;
}
