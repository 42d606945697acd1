// From logits to a token: temperature, top-k, and the argmax with Gumbel noise, a threadgroup an output. The bits are those of
// src/engine/sampler.rs and src/ops/decode/noise.rs: the noise of token id v at position t is f(seed, t, v).
#pragma METAL fp contract(off)

struct Sampling { uint vocab; uint purpose; };
// How an output is sampled: the lane that it belongs to, and the row's settings.
struct Output { uint lane; uint seed0; uint seed1; uint top_k; float temperature; };

// Reported for an output whose logits are not numbers; the pass after it takes an id that there is.
constant uint NOT_A_NUMBER = 0xFFFFFFFF;

// ln x for normal positive x (Cephes' logf), in products and sums that are never fused.
inline float plain_ln(float x) {
    uint shifted = as_type<uint>(x) - 0x3F3504F3u;
    float e = float(as_type<int>(shifted) >> 23);
    float m = as_type<float>((shifted & 0x007FFFFFu) + 0x3F3504F3u);
    float f = m - 1.0f;
    float z = f * f;
    float p = 7.0376836e-2f * f - 1.151461e-1f;
    p = p * f + 1.1676999e-1f;
    p = p * f - 1.2420141e-1f;
    p = p * f + 1.4249323e-1f;
    p = p * f - 1.6668058e-1f;
    p = p * f + 2.0000715e-1f;
    p = p * f - 2.4999994e-1f;
    p = p * f + 0.3333333f;
    float y = p * f * z;
    y = y - 2.1219444e-4f * e;
    y = y - 0.5f * z;
    return f + y + 0.6933594f * e;
}

inline float gumbel(uint word) {
    float u = (float(word >> 9) + 0.5f) * (1.0f / 8388608.0f);
    return -plain_ln(-plain_ln(u));
}

// Unsigned integers in the order of the numbers.
inline uint ordered(float x) {
    uint bits = as_type<uint>(x);
    return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

struct Place { uint index; uint simdgroup; uint lane; };

inline uint sum_of_uints(uint x, threadgroup float* shared, Place place) {
    // Counts below 2^24 are exact.
    return uint(sum_of_group(float(x), shared, place.lane, place.simdgroup, 8));
}

// The largest number of the group, the lowest id among equals.
inline uint best_id(float x, uint id, threadgroup float* shared, threadgroup uint* ids, Place place) {
    float most = max_of_group(x, shared, place.lane, place.simdgroup, 8);
    uint least = simd_min(x == most ? id : NOT_A_NUMBER);
    if (place.lane == 0) {
        ids[place.simdgroup] = least;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint s = 0; s < 8; ++s) {
        least = min(least, ids[s]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return least;
}

// The k-th largest of the scaled logits as an ordered integer, a byte at a time, and how many of its equals belong to the k.
inline uint2 kth(
    device const float* x, uint vocab, float best, float temperature, uint k, threadgroup atomic_uint* counts,
    threadgroup uint* found, Place place)
{
    uint prefix = 0, left = k;
    for (uint shift = 32; shift > 0; shift -= 8) {
        atomic_store_explicit(&counts[place.index], 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint id = place.index; id < vocab; id += 256) {
            uint key = ordered((x[id] - best) / temperature);
            if (shift == 32 || key >> shift == prefix) {
                atomic_fetch_add_explicit(&counts[(key >> (shift - 8)) & 255], 1u, memory_order_relaxed);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (place.index == 0) {
            uint byte = 256, sum = 0;
            while (byte > 0 && sum < left) {
                byte -= 1;
                sum += atomic_load_explicit(&counts[byte], memory_order_relaxed);
            }
            found[0] = byte;
            found[1] = sum - atomic_load_explicit(&counts[byte], memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        prefix = prefix << 8 | found[0];
        left -= found[1];
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    return uint2(prefix, left);
}

// The id from which on equals of the k-th largest are left out: `left` of them lie below it.
inline uint cut_of_equals(
    device const float* x, uint vocab, float best, float temperature, uint2 kth_and_left, threadgroup float* shared, Place place)
{
    uint low = 0, high = vocab;
    while (low < high) {
        uint middle = (low + high) / 2, count = 0;
        for (uint id = place.index; id <= middle; id += 256) {
            count += ordered((x[id] - best) / temperature) == kth_and_left.x ? 1 : 0;
        }
        // The same for all threads, so none leaves the loop alone.
        if (sum_of_uints(count, shared, place) >= kth_and_left.y) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low + 1;
}

kernel void sample(
    device const float* logits [[buffer(0)]],
    device const uint* outputs [[buffer(1)]],
    device const uint* lanes [[buffer(2)]],
    device uint* ids [[buffer(3)]],
    device uint* next_lanes [[buffer(4)]],
    device uint* reported [[buffer(5)]],
    constant Sampling& n [[buffer(6)]],
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float shared[32];
    threadgroup uint ids_of[32];
    threadgroup atomic_uint counts[256];
    threadgroup uint found[2];
    Place place = {thread_index, simdgroup, lane};
    device const float* x = logits + ulong(group) * n.vocab;
    device const Output& output = ((device const Output*)outputs)[group];
    uint row = lanes[2 * output.lane], position = lanes[2 * output.lane + 1] + 1;
    float most = -3.0e38f, odd = 0.0f;
    uint id_of_most = 0;
    for (uint id = thread_index; id < n.vocab; id += 256) {
        odd += isnan(x[id]) || x[id] > 3.4e38f ? 1.0f : 0.0f;
        if (x[id] > most) {
            most = x[id];
            id_of_most = id;
        }
    }
    odd = sum_of_group(odd, shared, lane, simdgroup, 8);
    uint chosen = best_id(most, id_of_most, shared, ids_of, place);
    float best = x[chosen], temperature = output.temperature;
    if (temperature > 0.0f) {
        bool limited = output.top_k > 0 && output.top_k < n.vocab;
        uint2 limit = uint2(0, 0);
        uint cut = n.vocab;
        if (limited) {
            limit = kth(x, n.vocab, best, temperature, output.top_k, counts, found, place);
            cut = cut_of_equals(x, n.vocab, best, temperature, limit, shared, place);
        }
        float top = -3.0e38f;
        uint id_of_top = 0;
        for (uint id = thread_index; id < n.vocab; id += 256) {
            float scaled = (x[id] - best) / temperature;
            uint key = ordered(scaled);
            if (!limited || key > limit.x || (key == limit.x && id < cut)) {
                uint4 words = philox4x32(uint4(id / 4, position, n.purpose << 8, 0), uint2(output.seed0, output.seed1));
                float noisy = scaled + gumbel(words[id % 4]);
                if (noisy > top) {
                    top = noisy;
                    id_of_top = id;
                }
            }
        }
        chosen = best_id(top, id_of_top, shared, ids_of, place);
    }
    if (thread_index == 0) {
        ids[group] = chosen;
        reported[group] = odd > 0.0f || !isfinite(best) ? NOT_A_NUMBER : chosen;
        next_lanes[2 * group] = row;
        next_lanes[2 * group + 1] = position;
    }
}
