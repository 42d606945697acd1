// Causal attention of grouped query heads, forward and backward, with no buffer that grows with T squared.
//
// A threadgroup has 32 rows of one head, 8 with each of its 4 simdgroups, whose factors and sums stay in matrices of the
// simdgroup. It walks over the rows that they meet, R at a time, which all simdgroups read in threadgroup memory. D is the
// head's width rounded up: columns past the width and rows past the sequence are zeros there. Metal does not say which lane
// has which element of a matrix, so scores pass through threadgroup memory, where lanes 4 r .. 4 r + 3 share row r.
// Every sum has one order, so results do not change from run to run. Dao, "FlashAttention-2" (2023).

// Elements between the rows of a tile, so that rows do not begin in the same bank of threadgroup memory.
constant constexpr uint PAD = 4;

// `window` keys are seen at most; `documents` says whether `starts` has where each token's document begins.
struct Attention { uint seq; uint heads; uint key_heads; uint dim; uint window; uint documents; uint add; float scale; };

// Where a thread is in its threadgroup of 128.
struct Place { uint index; uint simdgroup; uint lane; };

// A head's columns in a sequence's rows.
template <typename T>
struct Head { device const T* rows; uint stride; };

// Keys first .. end of a sequence.
struct Keys { uint first; uint end; };

// The keys that the query at t sees: their first does not fall from one query to the next. None past the sequence.
inline Keys keys_of(constant Attention& n, device const uint* starts, uint t) {
    Keys keys = {0, 0};
    if (t < n.seq) {
        keys.first = t + 1 > n.window ? t + 1 - n.window : 0;
        keys.end = t + 1;
        if (n.documents) {
            keys.first = max(keys.first, starts[t]);
        }
    }
    return keys;
}

// Column `head` of the heads in rows of qkv.
template <typename T>
inline Head<T> head_of(device const T* qkv, constant Attention& n, uint sequence, uint head) {
    uint stride = (n.heads + 2 * n.key_heads) * n.dim;
    Head<T> found = {qkv + ulong(sequence) * n.seq * stride + ulong(head) * n.dim, stride};
    return found;
}

// The same in rows of the output.
template <typename T>
inline Head<T> output_head(device const T* out, constant Attention& n, uint sequence, uint head) {
    uint stride = n.heads * n.dim;
    Head<T> found = {out + ulong(sequence) * n.seq * stride + ulong(head) * n.dim, stride};
    return found;
}

// R rows of a head from `first` on, times `factor`, by all threads of the threadgroup.
template <typename T, uint D, uint R>
inline void stage(Head<T> head, uint first, constant Attention& n, float factor, threadgroup float* tile, uint index) {
    UNROLL
    for (uint i = 0; i < R * D; i += 128) {
        uint row = (i + index) / D, column = (i + index) % D;
        bool inside = first + row < n.seq && column < n.dim;
        float x = inside ? number(head.rows[ulong(first + row) * head.stride + column]) * factor : 0.0f;
        tile[row * (D + PAD) + column] = x;
    }
}

// The 32 rows from `first` on, 8 to each simdgroup. The tile is free before and after.
template <typename T, uint D, uint R>
inline void load_own(Head<T> head, uint first, constant Attention& n, float factor, threadgroup float* tile, Place place,
                     thread simdgroup_float8x8* own) {
    uint row = place.simdgroup * 8;
    for (uint part = 0; part < 32; part += R) {
        stage<T, D, R>(head, first + part, n, factor, tile, place.index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (row >= part && row < part + R) {
            UNROLL
            for (uint i = 0; i < D / 8; ++i) {
                simdgroup_load(own[i], tile + (row - part) * (D + PAD) + i * 8, D + PAD);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

template <uint D>
inline void clear(thread simdgroup_float8x8* sums) {
    UNROLL
    for (uint i = 0; i < D / 8; ++i) {
        sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
}

// scores (8, R) = own (8, D) tile (R, D)^T. All lanes can read them afterwards.
template <uint D, uint R>
inline void multiply_rows(thread simdgroup_float8x8* own, threadgroup const float* tile, threadgroup float* scores) {
    simdgroup_float8x8 sums[R / 8], factor;
    clear<R>(sums);
    UNROLL
    for (uint i = 0; i < D / 8; ++i) {
        UNROLL
        for (uint j = 0; j < R / 8; ++j) {
            simdgroup_load(factor, tile + j * 8 * (D + PAD) + i * 8, D + PAD, ulong2(0, 0), true);
            simdgroup_multiply_accumulate(sums[j], own[i], factor, sums[j]);
        }
    }
    UNROLL
    for (uint j = 0; j < R / 8; ++j) {
        simdgroup_store(sums[j], scores + j * 8, R + PAD);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

// sums (8, D) += scores (8, R) tile (R, D), with scores as the lanes wrote them; they may be overwritten afterwards.
template <uint D, uint R>
inline void add_rows(threadgroup const float* scores, threadgroup const float* tile, thread simdgroup_float8x8* sums) {
    simdgroup_float8x8 weight, factor;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL
    for (uint j = 0; j < R / 8; ++j) {
        simdgroup_load(weight, scores + j * 8, R + PAD);
        UNROLL
        for (uint i = 0; i < D / 8; ++i) {
            simdgroup_load(factor, tile + j * 8 * (D + PAD) + i * 8, D + PAD);
            simdgroup_multiply_accumulate(sums[i], weight, factor, sums[i]);
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Multiplies each of the 8 rows by its element of a diagonal matrix.
template <uint D>
inline void scale_rows(threadgroup const float* diagonal, thread simdgroup_float8x8* sums) {
    simdgroup_float8x8 factors;
    simdgroup_load(factors, diagonal, 8);
    UNROLL
    for (uint i = 0; i < D / 8; ++i) {
        simdgroup_float8x8 sum = sums[i];
        simdgroup_multiply(sums[i], factors, sum);
    }
}

// Stores the 8 rows times `factor`, by way of `scores`, which no lane may still read; `to` is where the lane's row goes, if
// it is inside.
template <typename T, uint D, uint R>
inline void store_rows(thread simdgroup_float8x8* sums, threadgroup float* scores, device T* to, bool inside, float factor,
                       constant Attention& n, uint lane) {
    threadgroup const float* row = scores + lane / 4 * (R + PAD);
    UNROLL
    for (uint first = 0; first < D; first += R) {
        UNROLL
        for (uint j = 0; j < R / 8; ++j) {
            simdgroup_store(sums[first / 8 + j], scores + j * 8, R + PAD);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint c = lane % 4; c < R; c += 4) {
            if (inside && first + c < n.dim) {
                store(to[first + c], row[c] * factor, n.add);
            }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
}

// The softmax of a row over the keys so far, the same in the row's four lanes.
struct Softmax { float largest; float sum; };

// Scores of keys first .. first + R become e^(score - largest); returns what the sums so far must be multiplied by.
template <uint R>
inline float soften(threadgroup float* row, uint first, Keys seen, uint quarter, thread Softmax& softmax) {
    float largest = softmax.largest;
    for (uint c = quarter; c < R; c += 4) {
        bool visible = first + c >= seen.first && first + c < seen.end;
        largest = visible ? max(largest, row[c]) : largest;
    }
    largest = max(largest, simd_shuffle_xor(largest, 1));
    largest = max(largest, simd_shuffle_xor(largest, 2));
    float sum = 0.0f;
    for (uint c = quarter; c < R; c += 4) {
        bool visible = first + c >= seen.first && first + c < seen.end;
        row[c] = visible ? exp(row[c] - largest) : 0.0f;
        sum += row[c];
    }
    sum += simd_shuffle_xor(sum, 1);
    sum += simd_shuffle_xor(sum, 2);
    float factor = exp(softmax.largest - largest);
    softmax.largest = largest;
    softmax.sum = softmax.sum * factor + sum;
    return factor;
}

// A threadgroup has 32 queries and walks over the keys that any of them sees.
template <typename T, uint D, uint R>
kernel void attention_forward(
    device const T* qkv [[buffer(0)]],
    device const uint* starts [[buffer(1)]],
    device T* out [[buffer(2)]],
    device float* lse [[buffer(3)]],
    constant Attention& n [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    constexpr uint TILE = R * (D + PAD), SCORES = 32 * (R + PAD), DIAGONALS = 4 * 64;
    threadgroup float keys[TILE];
    threadgroup float values[TILE];
    threadgroup float all_scores[SCORES];
    threadgroup float diagonals[DIAGONALS];
    Place place = {thread_index, simdgroup, lane};
    // Later queries see more keys: the longest walks come first.
    uint first = (groups.x - 1 - group.x) * 32, end = min(first + 32, n.seq), head = group.y, sequence = group.z;
    uint key_head = n.heads + head / (n.heads / n.key_heads), quarter = lane % 4;
    uint t = first + simdgroup * 8 + lane / 4;
    starts += n.documents ? ulong(sequence) * n.seq : 0;
    Keys seen = keys_of(n, starts, t);
    threadgroup float* scores = all_scores + simdgroup * 8 * (R + PAD);
    threadgroup float* row = scores + lane / 4 * (R + PAD);
    threadgroup float* diagonal = diagonals + simdgroup * 64;
    diagonal[lane] = 0.0f;
    diagonal[lane + 32] = 0.0f;

    simdgroup_float8x8 queries[D / 8], sums[D / 8];
    load_own<T, D, R>(head_of(qkv, n, sequence, head), first, n, n.scale, keys, place, queries);
    clear<D>(sums);
    Softmax softmax = {LOWEST, 0.0f};
    for (uint key = keys_of(n, starts, first).first; key < end; key += R) {
        stage<T, D, R>(head_of(qkv, n, sequence, key_head), key, n, 1.0f, keys, thread_index);
        stage<T, D, R>(head_of(qkv, n, sequence, key_head + n.key_heads), key, n, 1.0f, values, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_rows<D, R>(queries, keys, scores);
        float factor = soften<R>(row, key, seen, quarter, softmax);
        // Most blocks have no larger score than those before.
        if (simd_any(factor != 1.0f)) {
            if (quarter == 0) {
                diagonal[lane / 4 * 9] = factor;
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
            scale_rows<D>(diagonal, sums);
        }
        add_rows<D, R>(scores, values, sums);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    bool inside = t < n.seq;
    device T* to = out + (ulong(sequence) * n.seq + t) * n.heads * n.dim + head * n.dim;
    store_rows<T, D, R>(sums, scores, to, inside, 1.0f / softmax.sum, n, lane);
    if (inside && quarter == 0) {
        lse[(ulong(sequence) * n.heads + head) * n.seq + t] = softmax.largest + log(softmax.sum);
    }
}

// What the softmax's normalisation takes from the gradients of a query's scores: the sum of dout out. A simdgroup a query.
template <typename T>
kernel void attention_delta(
    device const T* out [[buffer(0)]],
    device const T* dout [[buffer(1)]],
    device float* delta [[buffer(2)]],
    constant Attention& n [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    uint t = group.x * 4 + simdgroup, head = group.y, sequence = group.z;
    if (t >= n.seq) {
        return;
    }
    ulong at = ((ulong(sequence) * n.seq + t) * n.heads + head) * n.dim;
    float sum = 0.0f;
    for (uint c = lane; c < n.dim; c += 32) {
        sum += number(out[at + c]) * number(dout[at + c]);
    }
    sum = simd_sum(sum);
    if (lane == 0) {
        delta[(ulong(sequence) * n.heads + head) * n.seq + t] = sum;
    }
}

// What the backward needs of a query: its probabilities are p = e^(score - lse), gradients of its scores p (dp - delta).
struct Query { Keys seen; float lse; float delta; };

// The query at t; `at` is where its head's logarithms begin.
inline Query query_of(constant Attention& n, device const uint* starts, device const float* lse, device const float* delta,
                      ulong at, uint t) {
    Query query = {keys_of(n, starts, t), 0.0f, 0.0f};
    if (t < n.seq) {
        query.lse = lse[at + t];
        query.delta = delta[at + t];
    }
    return query;
}

inline float probability(Query query, uint key, float score) {
    return key >= query.seen.first && key < query.seen.end ? exp(score - query.lse) : 0.0f;
}

// A threadgroup has 32 keys and their values, and walks over the queries that see any of them, head by head of their group.
template <typename T, uint D, uint R>
kernel void attention_backward_keys(
    device const T* qkv [[buffer(0)]],
    device const uint* starts [[buffer(1)]],
    device const float* lse [[buffer(2)]],
    device const float* delta [[buffer(3)]],
    device const T* dout [[buffer(4)]],
    device T* dqkv [[buffer(5)]],
    constant Attention& n [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    constexpr uint TILE = R * (D + PAD), SCORES = 32 * (R + PAD);
    threadgroup float queries[TILE];
    threadgroup float douts[TILE];
    threadgroup float all_scores[SCORES];
    threadgroup Query columns[R];
    Place place = {thread_index, simdgroup, lane};
    uint first = group.x * 32, end = min(first + 32, n.seq), sequence = group.z;
    uint key_head = n.heads + group.y, quarter = lane % 4, key = first + simdgroup * 8 + lane / 4;
    starts += n.documents ? ulong(sequence) * n.seq : 0;
    threadgroup float* scores = all_scores + simdgroup * 8 * (R + PAD);
    threadgroup float* row = scores + lane / 4 * (R + PAD);

    simdgroup_float8x8 keys[D / 8], values[D / 8], dkeys[D / 8], dvalues[D / 8];
    load_own<T, D, R>(head_of(qkv, n, sequence, key_head), first, n, 1.0f, queries, place, keys);
    load_own<T, D, R>(head_of(qkv, n, sequence, key_head + n.key_heads), first, n, 1.0f, queries, place, values);
    clear<D>(dkeys);
    clear<D>(dvalues);
    uint heads = n.heads / n.key_heads;
    for (uint head = group.y * heads; head < (group.y + 1) * heads; ++head) {
        ulong stats = (ulong(sequence) * n.heads + head) * n.seq;
        for (uint query = first; query < n.seq && keys_of(n, starts, query).first < end; query += R) {
            stage<T, D, R>(head_of(qkv, n, sequence, head), query, n, n.scale, queries, thread_index);
            stage<T, D, R>(output_head(dout, n, sequence, head), query, n, 1.0f, douts, thread_index);
            if (thread_index < R) {
                columns[thread_index] = query_of(n, starts, lse, delta, stats, query + thread_index);
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            // (keys, queries): the transpose of the forward's.
            float p[R / 4];
            multiply_rows<D, R>(keys, queries, scores);
            UNROLL
            for (uint i = 0; i < R / 4; ++i) {
                uint c = quarter + 4 * i;
                p[i] = probability(columns[c], key, row[c]);
                row[c] = p[i];
            }
            add_rows<D, R>(scores, douts, dvalues);
            multiply_rows<D, R>(values, douts, scores);
            UNROLL
            for (uint i = 0; i < R / 4; ++i) {
                uint c = quarter + 4 * i;
                row[c] = p[i] * (row[c] - columns[c].delta);
            }
            add_rows<D, R>(scores, queries, dkeys);
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }

    bool inside = key < n.seq;
    ulong at = (ulong(sequence) * n.seq + key) * (n.heads + 2 * n.key_heads) * n.dim + key_head * n.dim;
    // The queries were scaled already.
    store_rows<T, D, R>(dkeys, scores, dqkv + at, inside, 1.0f, n, lane);
    store_rows<T, D, R>(dvalues, scores, dqkv + at + n.key_heads * n.dim, inside, 1.0f, n, lane);
}

// A threadgroup has 32 queries and walks over the keys that any of them sees, as the forward does.
template <typename T, uint D, uint R>
kernel void attention_backward_queries(
    device const T* qkv [[buffer(0)]],
    device const uint* starts [[buffer(1)]],
    device const float* lse [[buffer(2)]],
    device const float* delta [[buffer(3)]],
    device const T* dout [[buffer(4)]],
    device T* dqkv [[buffer(5)]],
    constant Attention& n [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    constexpr uint TILE = R * (D + PAD), SCORES = 32 * (R + PAD);
    threadgroup float keys[TILE];
    threadgroup float values[TILE];
    threadgroup float all_scores[SCORES];
    Place place = {thread_index, simdgroup, lane};
    uint first = (groups.x - 1 - group.x) * 32, end = min(first + 32, n.seq), head = group.y, sequence = group.z;
    uint key_head = n.heads + head / (n.heads / n.key_heads), quarter = lane % 4;
    uint t = first + simdgroup * 8 + lane / 4;
    starts += n.documents ? ulong(sequence) * n.seq : 0;
    Query own = query_of(n, starts, lse, delta, (ulong(sequence) * n.heads + head) * n.seq, t);
    threadgroup float* scores = all_scores + simdgroup * 8 * (R + PAD);
    threadgroup float* row = scores + lane / 4 * (R + PAD);

    simdgroup_float8x8 queries[D / 8], douts[D / 8], dqueries[D / 8];
    load_own<T, D, R>(head_of(qkv, n, sequence, head), first, n, n.scale, keys, place, queries);
    load_own<T, D, R>(output_head(dout, n, sequence, head), first, n, 1.0f, keys, place, douts);
    clear<D>(dqueries);
    for (uint key = keys_of(n, starts, first).first; key < end; key += R) {
        stage<T, D, R>(head_of(qkv, n, sequence, key_head), key, n, 1.0f, keys, thread_index);
        stage<T, D, R>(head_of(qkv, n, sequence, key_head + n.key_heads), key, n, 1.0f, values, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float p[R / 4];
        multiply_rows<D, R>(queries, keys, scores);
        UNROLL
        for (uint i = 0; i < R / 4; ++i) {
            uint c = quarter + 4 * i;
            p[i] = probability(own, key + c, row[c]);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        multiply_rows<D, R>(douts, values, scores);
        UNROLL
        for (uint i = 0; i < R / 4; ++i) {
            uint c = quarter + 4 * i;
            row[c] = p[i] * (row[c] - own.delta);
        }
        add_rows<D, R>(scores, keys, dqueries);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    device T* to = dqkv + (ulong(sequence) * n.seq + t) * (n.heads + 2 * n.key_heads) * n.dim + head * n.dim;
    store_rows<T, D, R>(dqueries, scores, to, t < n.seq, n.scale, n, lane);
}

instantiate_types("attention_delta", attention_delta)
instantiate("attention_forward_f32_32", attention_forward, float, 32, 32)
instantiate("attention_forward_f32_64", attention_forward, float, 64, 32)
instantiate("attention_forward_f32_128", attention_forward, float, 128, 16)
instantiate("attention_forward_f32_256", attention_forward, float, 256, 8)
instantiate("attention_forward_f16_32", attention_forward, half, 32, 32)
instantiate("attention_forward_f16_64", attention_forward, half, 64, 32)
instantiate("attention_forward_f16_128", attention_forward, half, 128, 16)
instantiate("attention_forward_f16_256", attention_forward, half, 256, 8)
instantiate("attention_forward_bf16_32", attention_forward, bf16, 32, 32)
instantiate("attention_forward_bf16_64", attention_forward, bf16, 64, 32)
instantiate("attention_forward_bf16_128", attention_forward, bf16, 128, 16)
instantiate("attention_forward_bf16_256", attention_forward, bf16, 256, 8)
instantiate("attention_backward_keys_f32_32", attention_backward_keys, float, 32, 32)
instantiate("attention_backward_keys_f32_64", attention_backward_keys, float, 64, 32)
instantiate("attention_backward_keys_f32_128", attention_backward_keys, float, 128, 16)
instantiate("attention_backward_keys_f32_256", attention_backward_keys, float, 256, 8)
instantiate("attention_backward_keys_f16_32", attention_backward_keys, half, 32, 32)
instantiate("attention_backward_keys_f16_64", attention_backward_keys, half, 64, 32)
instantiate("attention_backward_keys_f16_128", attention_backward_keys, half, 128, 16)
instantiate("attention_backward_keys_f16_256", attention_backward_keys, half, 256, 8)
instantiate("attention_backward_keys_bf16_32", attention_backward_keys, bf16, 32, 32)
instantiate("attention_backward_keys_bf16_64", attention_backward_keys, bf16, 64, 32)
instantiate("attention_backward_keys_bf16_128", attention_backward_keys, bf16, 128, 16)
instantiate("attention_backward_keys_bf16_256", attention_backward_keys, bf16, 256, 8)
instantiate("attention_backward_queries_f32_32", attention_backward_queries, float, 32, 32)
instantiate("attention_backward_queries_f32_64", attention_backward_queries, float, 64, 32)
instantiate("attention_backward_queries_f32_128", attention_backward_queries, float, 128, 16)
instantiate("attention_backward_queries_f32_256", attention_backward_queries, float, 256, 8)
instantiate("attention_backward_queries_f16_32", attention_backward_queries, half, 32, 32)
instantiate("attention_backward_queries_f16_64", attention_backward_queries, half, 64, 32)
instantiate("attention_backward_queries_f16_128", attention_backward_queries, half, 128, 16)
instantiate("attention_backward_queries_f16_256", attention_backward_queries, half, 256, 8)
instantiate("attention_backward_queries_bf16_32", attention_backward_queries, bf16, 32, 32)
instantiate("attention_backward_queries_bf16_64", attention_backward_queries, bf16, 64, 32)
instantiate("attention_backward_queries_bf16_128", attention_backward_queries, bf16, 128, 16)
instantiate("attention_backward_queries_bf16_256", attention_backward_queries, bf16, 256, 8)
