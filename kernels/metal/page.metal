// A step's queries and keys, normalised and turned, and the keys and values appended to the pages of their rows: a simdgroup a
// head of a lane. Pages are those of src/ops/decode/page.rs, byte for byte, in a pool; a row's table names its pages by block.

struct Appending {
    uint query_heads;
    uint key_value_heads;
    uint dim;
    uint normed;
    float eps;
    // Numbers of the cache that share a scale.
    uint group;
    // The layer's tables begin here, and a row's are so long.
    uint table_start;
    uint table_length;
    // A window of the layer's own, without sinks; 0 leaves the row's.
    uint own_window;
    // Bytes of a page, plain and quantised.
    uint plain_bytes;
    uint page_bytes;
};

// What a row is: window, sinks, and how many of its first pages are plain.
struct Row { uint window; uint sinks; uint plain_blocks; uint unused; };

inline void write_plain(device uchar* page, uint head, uint heads, uint dim, uint slot, uint i, float key, float value, float) {
    device float* keys = (device float*)page + head * dim * 64;
    device float* values = (device float*)page + (heads + head) * dim * 64;
    keys[i * 64 + slot] = key;
    values[slot * dim + i] = value;
}

// Pairs share a word: neighbours of the head in the keys, of the slots in the values. Each half is stored alone.
inline void write_plain(device uchar* page, uint head, uint heads, uint dim, uint slot, uint i, float key, float value, bf16) {
    device bf16* keys = (device bf16*)page + head * dim * 64;
    device bf16* values = (device bf16*)page + (heads + head) * dim * 64;
    keys[(i / 2 * 64 + slot) * 2 + i % 2] = round_bf16(key);
    values[(slot / 2 * dim + i) * 2 + slot % 2] = round_bf16(value);
}

// Codes of one head's numbers, x(i) being lane i % 32's number i / 32: each group of them has a step and a least number in f16.
// `stride` apart are a number's neighbours, and so are the groups' scales.
template <uint BITS>
inline void write_codes(
    device uchar* codes, device uint* scales, thread const float* x, uint dim, uint group, uint stride, uint scale_stride, uint lane)
{
    float levels = float((1u << BITS) - 1);
    for (uint first = 0; first < dim; first += group) {
        float least = 3.0e38f, most = -3.0e38f;
        for (uint k = 0; k * 32 < dim; ++k) {
            uint i = k * 32 + lane;
            if (i >= first && i < min(first + group, dim)) {
                least = min(least, x[k]);
                most = max(most, x[k]);
            }
        }
        least = simd_min(least);
        most = simd_max(most);
        half step = half(clamp((most - least) / levels, -65504.0f, 65504.0f));
        half low = half(clamp(least, -65504.0f, 65504.0f));
        if (lane == 0) {
            scales[first / group * scale_stride] = uint(as_type<ushort>(step)) | uint(as_type<ushort>(low)) << 16;
        }
        float inverse = float(step) > 0.0f ? 1.0f / float(step) : 0.0f;
        for (uint k = 0; k * 32 < dim; ++k) {
            uint i = k * 32 + lane;
            bool own = i >= first && i < min(first + group, dim);
            uint code = own ? uint(clamp(rint((x[k] - float(low)) * inverse), 0.0f, levels)) : 0;
            // Of four bits the numbers from dim / 2 on come later, into the high halves of these bytes.
            if (own && (BITS == 8 || i < dim / 2)) {
                codes[i * stride] = uchar(code);
            }
        }
    }
}

// The high halves of bytes whose low halves are written: codes again, for the numbers from dim / 2 on.
inline void write_high_codes(
    device uchar* codes, device const uint* scales, thread const float* x, uint dim, uint group, uint stride, uint scale_stride, uint lane)
{
    for (uint k = 0; k * 32 < dim; ++k) {
        uint i = k * 32 + lane;
        if (i >= dim / 2 && i < dim) {
            uint scale = scales[i / group * scale_stride];
            float step = float(as_type<half>(ushort(scale))), low = float(as_type<half>(ushort(scale >> 16)));
            float inverse = step > 0.0f ? 1.0f / step : 0.0f;
            uint code = uint(clamp(rint((x[k] - low) * inverse), 0.0f, 15.0f));
            codes[(i - dim / 2) * stride] = uchar(codes[(i - dim / 2) * stride] | code << 4);
        }
    }
}

template <uint BITS>
inline void write_quantised(
    device uchar* page, uint head, uint heads, uint dim, uint group, uint slot, thread const float* key, thread const float* value, uint lane)
{
    uint bytes = dim * BITS / 8, groups = (dim + group - 1) / group;
    device uchar* keys = page + head * bytes * 64 + slot;
    device uchar* values = page + (heads * 64 + head * 64 + slot) * bytes;
    device uint* key_scales = (device uint*)(page + 2 * heads * bytes * 64) + head * groups * 64 + slot;
    device uint* value_scales = (device uint*)(page + 2 * heads * bytes * 64) + (heads * 64 + head * 64 + slot) * groups;
    write_codes<BITS>(keys, key_scales, key, dim, group, 64, 64, lane);
    write_codes<BITS>(values, value_scales, value, dim, group, 1, 1, lane);
    if (BITS == 4) {
        simdgroup_barrier(mem_flags::mem_device);
        write_high_codes(keys, key_scales, key, dim, group, 64, 64, lane);
        write_high_codes(values, value_scales, value, dim, group, 1, 1, lane);
    }
}

// x = x / rms(x) gain, of a head that lies with the lanes.
inline void normalise(thread float* x, device const float* gain, uint dim, float eps, uint lane) {
    float sum = 0.0f;
    for (uint k = 0; k * 32 < dim; ++k) {
        sum = fma(x[k], x[k], sum);
    }
    float factor = 1.0f / sqrt(simd_sum(sum) / float(dim) + eps);
    for (uint k = 0; k * 32 < dim; ++k) {
        uint i = k * 32 + lane;
        x[k] = i < dim ? x[k] * factor * gain[i] : 0.0f;
    }
}

// Element i of a head turned by the angles of a position: cosines, then sines. The partner comes from threadgroup memory.
inline float turned(threadgroup const float* head, device const float* angles, uint dim, uint i) {
    uint half_dim = dim / 2, pair = i % half_dim;
    float a = head[pair], b = head[half_dim + pair], c = angles[pair], s = angles[half_dim + pair];
    return i < half_dim ? fma(a, c, -(b * s)) : fma(b, c, a * s);
}

template <typename P, uint BITS>
kernel void append(
    device const float* qkv [[buffer(0)]],
    device const float* angles [[buffer(1)]],
    device const uint* lanes [[buffer(2)]],
    device const uint* rows [[buffer(3)]],
    device const uint* tables [[buffer(4)]],
    device const float* query_gain [[buffer(5)]],
    device const float* key_gain [[buffer(6)]],
    device float* query [[buffer(7)]],
    device uchar* plain [[buffer(8)]],
    device uchar* pages [[buffer(9)]],
    constant Appending& n [[buffer(10)]],
    uint2 place [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float heads[1024];
    uint head = place.x * 4 + simdgroup, step = place.y, dim = n.dim, all = n.query_heads + n.key_value_heads;
    bool is_query = head < n.query_heads, active = head < all;
    threadgroup float* own = heads + simdgroup * 256;
    ulong row_start = ulong(step) * (all + n.key_value_heads) * dim;
    float x[8];
    for (uint k = 0; k * 32 < dim; ++k) {
        uint i = k * 32 + lane;
        x[k] = active && i < dim ? qkv[row_start + head * dim + i] : 0.0f;
    }
    if (active && n.normed) {
        normalise(x, is_query ? query_gain : key_gain, dim, n.eps, lane);
    }
    for (uint k = 0; k * 32 < dim; ++k) {
        uint i = k * 32 + lane;
        if (i < dim) {
            own[i] = x[k];
        }
    }
    // The whole simdgroup, with or without a head of its own.
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (!active) {
        return;
    }
    uint row = lanes[2 * step], position = lanes[2 * step + 1];
    device const Row& settings = ((device const Row*)rows)[row];
    uint window = n.own_window ? n.own_window : settings.window, sinks = n.own_window ? 0 : settings.sinks;
    device const float* here = angles + ulong(position) * dim;
    if (is_query) {
        uint beyond = sinks > 0 ? min(position, sinks + (window - 1)) : position;
        device const float* there = angles + ulong(beyond) * dim;
        ulong at = ulong(step) * 2 * n.query_heads * dim + head * dim;
        for (uint i = lane; i < dim; i += 32) {
            query[at + i] = turned(own, here, dim, i);
            query[at + n.query_heads * dim + i] = turned(own, there, dim, i);
        }
        return;
    }
    uint kv = head - n.query_heads, block = position / 64, slot = position % 64;
    uint id = tables[n.table_start + row * n.table_length + block];
    float value[8];
    for (uint k = 0; k * 32 < dim; ++k) {
        uint i = k * 32 + lane;
        x[k] = i < dim ? turned(own, here, dim, i) : 0.0f;
        value[k] = i < dim ? qkv[row_start + (all + kv) * dim + i] : 0.0f;
    }
    if (BITS == 0 || block < settings.plain_blocks) {
        for (uint k = 0; k * 32 < dim; ++k) {
            uint i = k * 32 + lane;
            if (i < dim) {
                write_plain(plain + ulong(id) * n.plain_bytes, kv, n.key_value_heads, dim, slot, i, x[k], value[k], P());
            }
        }
    } else {
        write_quantised<BITS == 0 ? 8 : BITS>(
            pages + ulong(id) * n.page_bytes, kv, n.key_value_heads, dim, n.group, slot, x, value, lane);
    }
}

instantiate("append_f32", append, float, 0)
instantiate("append_bf16", append, bf16, 0)
instantiate("append_f32_q8", append, float, 8)
instantiate("append_bf16_q8", append, bf16, 8)
instantiate("append_f32_q4", append, float, 4)
instantiate("append_bf16_q4", append, bf16, 4)
