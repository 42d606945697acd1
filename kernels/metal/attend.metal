// Attention of a step's lanes over the pages of their rows. A threadgroup takes one query head over a stretch of 256 absolute
// positions, each of its eight simdgroups 32 keys, a lane a key; a second kernel joins the stretches in order. So the order of
// every sum depends only on position, window and sinks.

struct Attending {
    uint query_heads;
    uint key_value_heads;
    uint dim;
    uint group;
    uint table_start;
    uint table_length;
    uint own_window;
    uint plain_bytes;
    uint page_bytes;
    // Stretches that every lane has room for.
    uint stretches;
};
struct Joining { uint query_heads; uint dim; uint stretches; };

struct Row { uint window; uint sinks; uint plain_blocks; uint unused; };

// A page's head as numbers: plain ones, or codes with the step and the least number of their group.
template <typename P> struct PlainPage;
template <> struct PlainPage<float> {
    static float key(device const uchar* page, uint head, uint, uint dim, uint slot, uint i) {
        return ((device const float*)page)[(head * dim + i) * 64 + slot];
    }
    static float value(device const uchar* page, uint head, uint heads, uint dim, uint slot, uint i) {
        return ((device const float*)page)[((heads + head) * 64 + slot) * dim + i];
    }
};
template <> struct PlainPage<bf16> {
    static float key(device const uchar* page, uint head, uint, uint dim, uint slot, uint i) {
        return number(((device const bf16*)page)[head * dim * 64 + (i / 2 * 64 + slot) * 2 + i % 2]);
    }
    static float value(device const uchar* page, uint head, uint heads, uint dim, uint slot, uint i) {
        return number(((device const bf16*)page)[(heads + head) * dim * 64 + (slot / 2 * dim + i) * 2 + slot % 2]);
    }
};

inline float decoded(uint code, uint scale) {
    return float(code) * float(as_type<half>(ushort(scale))) + float(as_type<half>(ushort(scale >> 16)));
}

template <uint BITS>
struct Codes {
    static uint code(device const uchar* codes, uint dim, uint stride, uint i) {
        if (BITS == 8) {
            return codes[i * stride];
        }
        return i < dim / 2 ? codes[i * stride] & 15 : codes[(i - dim / 2) * stride] >> 4;
    }
    static float key(device const uchar* page, uint head, uint heads, uint dim, uint group, uint slot, uint i) {
        uint bytes = dim * BITS / 8, groups = (dim + group - 1) / group;
        device const uint* scales = (device const uint*)(page + 2 * heads * bytes * 64);
        return decoded(code(page + head * bytes * 64 + slot, dim, 64, i), scales[(head * groups + i / group) * 64 + slot]);
    }
    static float value(device const uchar* page, uint head, uint heads, uint dim, uint group, uint slot, uint i) {
        uint bytes = dim * BITS / 8, groups = (dim + group - 1) / group;
        device const uint* scales = (device const uint*)(page + 2 * heads * bytes * 64);
        uint at = (heads + head) * 64 + slot;
        return decoded(code(page + at * bytes, dim, 1, i), scales[at * groups + i / group]);
    }
};

template <typename P, uint BITS>
kernel void attend(
    device const float* query [[buffer(0)]],
    device const uint* lanes [[buffer(1)]],
    device const uint* rows [[buffer(2)]],
    device const uint* tables [[buffer(3)]],
    device const uchar* plain [[buffer(4)]],
    device const uchar* pages [[buffer(5)]],
    device float* partial [[buffer(6)]],
    constant Attending& n [[buffer(7)]],
    uint3 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float near_query[256];
    threadgroup float sink_query[256];
    threadgroup float weights[256];
    threadgroup float sums[2048];
    threadgroup float most_of[8];
    threadgroup float total_of[8];
    uint step = place.z, head = place.y, dim = n.dim, kv = head / (n.query_heads / n.key_value_heads);
    uint row = lanes[2 * step], position = lanes[2 * step + 1];
    device const Row& settings = ((device const Row*)rows)[row];
    uint window = n.own_window ? n.own_window : settings.window, sinks = n.own_window ? 0 : settings.sinks;
    uint oldest = position + 1 > window ? position + 1 - window : 0;
    // The stretches with sinks, then those from the window's first on.
    uint sink_stretches = (min(sinks, position + 1) + 255) / 256;
    uint stretch = place.x < sink_stretches ? place.x : max(sink_stretches, oldest / 256) + place.x - sink_stretches;
    ulong from = (ulong(step) * 2 * n.query_heads + head) * dim;
    for (uint i = thread_index; i < dim; i += 256) {
        near_query[i] = query[from + i];
        sink_query[i] = query[from + n.query_heads * dim + i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint key = stretch * 256 + thread_index, first_block = (stretch * 256 + simdgroup * 32) / 64;
    bool seen = key <= position && (key >= oldest || key < sinks);
    // A simdgroup's keys lie in one page; without a visible one it reads nothing.
    bool any = simd_any(seen);
    uint id = any ? tables[n.table_start + row * n.table_length + first_block] : 0;
    bool is_plain = BITS == 0 || first_block < settings.plain_blocks;
    device const uchar* page = is_plain ? plain + ulong(id) * n.plain_bytes : pages + ulong(id) * n.page_bytes;
    constexpr uint bits = BITS == 0 ? 8 : BITS;
    float score = LOWEST;
    if (seen) {
        threadgroup const float* own = key < sinks ? sink_query : near_query;
        float sum = 0.0f;
        for (uint i = 0; i < dim; ++i) {
            float x = is_plain ? PlainPage<P>::key(page, kv, n.key_value_heads, dim, key % 64, i)
                               : Codes<bits>::key(page, kv, n.key_value_heads, dim, n.group, key % 64, i);
            sum = fma(own[i], x, sum);
        }
        score = sum / sqrt(float(dim));
    }
    float most = simd_max(score), weight = seen ? exp(score - most) : 0.0f, total = simd_sum(weight);
    weights[thread_index] = weight;
    if (lane == 0) {
        most_of[simdgroup] = most;
        total_of[simdgroup] = total;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = lane; i < dim; i += 32) {
        float sum = 0.0f;
        for (uint j = 0; j < 32 && any; ++j) {
            uint slot = (simdgroup * 32 + j) % 64;
            float w = weights[simdgroup * 32 + j];
            // What is not visible may never have been written.
            if (w > 0.0f) {
                float x = is_plain ? PlainPage<P>::value(page, kv, n.key_value_heads, dim, slot, i)
                                   : Codes<bits>::value(page, kv, n.key_value_heads, dim, n.group, slot, i);
                sum = fma(w, x, sum);
            }
        }
        sums[simdgroup * 256 + i] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float top = most_of[0];
    for (uint s = 1; s < 8; ++s) {
        top = max(top, most_of[s]);
    }
    ulong to = ((ulong(step) * n.query_heads + head) * n.stretches + place.x) * (dim + 2);
    for (uint i = thread_index; i < dim; i += 256) {
        float sum = 0.0f;
        for (uint s = 0; s < 8; ++s) {
            sum = fma(sums[s * 256 + i], exp(most_of[s] - top), sum);
        }
        partial[to + 2 + i] = sum;
    }
    if (thread_index == 0) {
        float all = 0.0f;
        for (uint s = 0; s < 8; ++s) {
            all = fma(total_of[s], exp(most_of[s] - top), all);
        }
        partial[to] = top;
        partial[to + 1] = all;
    }
}

// A threadgroup a query head of a lane.
kernel void attend_join(
    device const float* partial [[buffer(0)]],
    device float* attention [[buffer(1)]],
    constant Joining& n [[buffer(2)]],
    uint2 place [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]])
{
    ulong stretch = n.dim + 2, task = ulong(place.y) * n.query_heads + place.x;
    device const float* from = partial + task * n.stretches * stretch;
    float top = from[0];
    for (uint s = 1; s < n.stretches; ++s) {
        top = max(top, from[s * stretch]);
    }
    float all = 0.0f;
    for (uint s = 0; s < n.stretches; ++s) {
        all = fma(from[s * stretch + 1], exp(from[s * stretch] - top), all);
    }
    for (uint i = thread_index; i < n.dim; i += 64) {
        float sum = 0.0f;
        for (uint s = 0; s < n.stretches; ++s) {
            sum = fma(from[s * stretch + 2 + i], exp(from[s * stretch] - top), sum);
        }
        attention[task * n.dim + i] = sum / all;
    }
}

instantiate("attend_f32", attend, float, 0)
instantiate("attend_bf16", attend, bf16, 0)
instantiate("attend_f32_q8", attend, float, 8)
instantiate("attend_bf16_q8", attend, bf16, 8)
instantiate("attend_f32_q4", attend, float, 4)
instantiate("attend_bf16_q4", attend, bf16, 4)
