// Query/key norm and rotary positions of fused rows (N, (H + 2K) D); values pass through. Pairs are (i, i + D/2).
// Forward: a simdgroup a head of a row. Backward: a threadgroup for each 16 rows, whose share of the gains' gradients is summed
// in the order of rows and heads.

struct Rotary { uint heads; uint rotated; uint dim; uint query_heads; uint seq; uint normed; float eps; };
struct RotaryBackward { uint rows; uint heads; uint rotated; uint dim; uint query_heads; uint seq; uint normed; uint add; };

template <typename T>
kernel void rotary(
    device const T* qkv [[buffer(0)]],
    device const float* cosines [[buffer(1)]],
    device const float* sines [[buffer(2)]],
    device const T* query_gain [[buffer(3)]],
    device const T* key_gain [[buffer(4)]],
    device T* y [[buffer(5)]],
    device float* rstd [[buffer(6)]],
    constant Rotary& n [[buffer(7)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    uint row = group.y, head = group.x * 8 + simdgroup, half_dim = n.dim / 2;
    if (head >= n.heads) {
        return;
    }
    ulong at = (ulong(row) * n.heads + head) * n.dim;
    if (head >= n.rotated) {
        for (uint i = lane; i < n.dim; i += 32) {
            y[at + i] = qkv[at + i];
        }
        return;
    }
    float factor = 1.0f;
    if (n.normed) {
        float sum = 0.0f;
        for (uint i = lane; i < n.dim; i += 32) {
            sum += number(qkv[at + i]) * number(qkv[at + i]);
        }
        factor = 1.0f / sqrt(simd_sum(sum) / float(n.dim) + n.eps);
        if (lane == 0) {
            rstd[row * n.rotated + head] = factor;
        }
    }
    device const T* gain = head < n.query_heads ? query_gain : key_gain;
    ulong angle = ulong(row % n.seq) * half_dim;
    for (uint i = lane; i < half_dim; i += 32) {
        float a = number(qkv[at + i]), b = number(qkv[at + half_dim + i]);
        if (n.normed) {
            a *= factor * number(gain[i]);
            b *= factor * number(gain[half_dim + i]);
        }
        float c = cosines[angle + i], s = sines[angle + i];
        put(y[at + i], fma(a, c, -b * s));
        put(y[at + half_dim + i], fma(b, c, a * s));
    }
}

// Element i of a head's gradient, turned back: the turn's transpose.
template <typename T>
inline float turned_back(device const T* dy, device const float* cosines, device const float* sines, uint half_dim, uint i) {
    uint pair = i % half_dim;
    float a = number(dy[pair]), b = number(dy[half_dim + pair]);
    return i < half_dim ? fma(a, cosines[pair], b * sines[pair]) : fma(b, cosines[pair], -a * sines[pair]);
}

template <typename T>
kernel void rotary_backward(
    device const T* qkv [[buffer(0)]],
    device const float* rstd [[buffer(1)]],
    device const float* cosines [[buffer(2)]],
    device const float* sines [[buffer(3)]],
    device const T* query_gain [[buffer(4)]],
    device const T* key_gain [[buffer(5)]],
    device const T* dout [[buffer(6)]],
    device T* dqkv [[buffer(7)]],
    device float* partial [[buffer(8)]],
    constant RotaryBackward& n [[buffer(9)]],
    uint block [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    uint half_dim = n.dim / 2, first = block * 16, end = min(first + 16, n.rows);
    for (uint task = simdgroup; task < (end - first) * n.heads; task += 8) {
        uint row = first + task / n.heads, head = task % n.heads;
        ulong at = (ulong(row) * n.heads + head) * n.dim, angle = ulong(row % n.seq) * half_dim;
        if (head >= n.rotated) {
            for (uint i = lane; i < n.dim; i += 32) {
                store(dqkv[at + i], number(dout[at + i]), n.add);
            }
            continue;
        }
        device const T* gain = head < n.query_heads ? query_gain : key_gain;
        float factor = 1.0f, mean = 0.0f;
        if (n.normed) {
            float sum = 0.0f;
            for (uint i = lane; i < n.dim; i += 32) {
                float own = turned_back(dout + at, cosines + angle, sines + angle, half_dim, i);
                sum += number(gain[i]) * own * number(qkv[at + i]);
            }
            factor = rstd[row * n.rotated + head];
            mean = simd_sum(sum) / float(n.dim) * factor * factor;
        }
        for (uint i = lane; i < n.dim; i += 32) {
            float own = turned_back(dout + at, cosines + angle, sines + angle, half_dim, i);
            if (n.normed) {
                own = factor * fma(-mean, number(qkv[at + i]), number(gain[i]) * own);
            }
            store(dqkv[at + i], own, n.add);
        }
    }
    if (!n.normed) {
        return;
    }
    for (uint j = thread_index; j < 2 * n.dim; j += 256) {
        uint i = j % n.dim, from = j < n.dim ? 0 : n.query_heads, to = j < n.dim ? n.query_heads : n.rotated;
        float sum = 0.0f;
        for (uint row = first; row < end; ++row) {
            ulong angle = ulong(row % n.seq) * half_dim;
            for (uint head = from; head < to; ++head) {
                ulong at = (ulong(row) * n.heads + head) * n.dim;
                float own = turned_back(dout + at, cosines + angle, sines + angle, half_dim, i);
                sum = fma(own * rstd[row * n.rotated + head], number(qkv[at + i]), sum);
            }
        }
        partial[ulong(block) * 2 * n.dim + j] = sum;
    }
}

instantiate_types("rotary", rotary)
instantiate_types("rotary_backward", rotary_backward)
