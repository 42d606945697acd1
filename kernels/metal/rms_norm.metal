// RMS norm of rows: a simdgroup a row, eight rows a threadgroup. The backward has a threadgroup for each block of 64 rows, whose
// share of the gain's gradient is summed in the order of the rows.

struct Norm { uint rows; uint columns; float eps; };
struct NormBackward { uint rows; uint columns; uint add; };
struct Blocks { uint blocks; uint stride; uint offset; uint columns; uint add; };

template <typename T>
inline float inverse_rms(device const T* x, uint columns, float eps, uint lane) {
    float sum = 0.0f;
    for (uint c = lane; c < columns; c += 32) {
        sum += number(x[c]) * number(x[c]);
    }
    return 1.0f / sqrt(simd_sum(sum) / float(columns) + eps);
}

template <typename T>
kernel void rms_norm(
    device const T* x [[buffer(0)]],
    device const T* weight [[buffer(1)]],
    device T* y [[buffer(2)]],
    device float* rstd [[buffer(3)]],
    constant Norm& n [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    uint row = group * 8 + simdgroup;
    if (row >= n.rows) {
        return;
    }
    device const T* from = x + ulong(row) * n.columns;
    device T* to = y + ulong(row) * n.columns;
    float factor = inverse_rms(from, n.columns, n.eps, lane);
    for (uint c = lane; c < n.columns; c += 32) {
        put(to[c], number(from[c]) * factor * number(weight[c]));
    }
    if (lane == 0) {
        rstd[row] = factor;
    }
}

// x += residual, and y is its norm.
template <typename T>
kernel void rms_norm_add(
    device T* x [[buffer(0)]],
    device const T* residual [[buffer(1)]],
    device const T* weight [[buffer(2)]],
    device T* y [[buffer(3)]],
    device float* rstd [[buffer(4)]],
    constant Norm& n [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    uint row = group * 8 + simdgroup;
    if (row >= n.rows) {
        return;
    }
    device T* sums = x + ulong(row) * n.columns;
    device const T* more = residual + ulong(row) * n.columns;
    device T* to = y + ulong(row) * n.columns;
    // Each lane reads only what it wrote itself.
    float sum = 0.0f;
    for (uint c = lane; c < n.columns; c += 32) {
        put(sums[c], number(sums[c]) + number(more[c]));
        sum += number(sums[c]) * number(sums[c]);
    }
    float factor = 1.0f / sqrt(simd_sum(sum) / float(n.columns) + n.eps);
    for (uint c = lane; c < n.columns; c += 32) {
        put(to[c], number(sums[c]) * factor * number(weight[c]));
    }
    if (lane == 0) {
        rstd[row] = factor;
    }
}

// dx (+)= rstd (weight dy - x rstd^2 mean(weight dy x)); partial has the sums of dy x rstd over each block's rows.
template <typename T>
kernel void rms_norm_backward(
    device const T* x [[buffer(0)]],
    device const T* weight [[buffer(1)]],
    device const float* rstd [[buffer(2)]],
    device const T* dy [[buffer(3)]],
    device T* dx [[buffer(4)]],
    device float* partial [[buffer(5)]],
    constant NormBackward& n [[buffer(6)]],
    uint block [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    uint first = block * 64, end = min(first + 64, n.rows);
    for (uint row = first + simdgroup; row < end; row += 8) {
        ulong at = ulong(row) * n.columns;
        float sum = 0.0f;
        for (uint c = lane; c < n.columns; c += 32) {
            sum += number(weight[c]) * number(dy[at + c]) * number(x[at + c]);
        }
        float factor = rstd[row];
        float mean = simd_sum(sum) / float(n.columns) * factor * factor;
        for (uint c = lane; c < n.columns; c += 32) {
            float own = number(weight[c]) * number(dy[at + c]) - mean * number(x[at + c]);
            store(dx[at + c], factor * own, n.add);
        }
    }
    for (uint c = thread_index; c < n.columns; c += 256) {
        float sum = 0.0f;
        for (uint row = first; row < end; ++row) {
            ulong at = ulong(row) * n.columns + c;
            sum += number(dy[at]) * number(x[at]) * rstd[row];
        }
        partial[ulong(block) * n.columns + c] = sum;
    }
}

kernel void add_blocks(
    device const float* partial [[buffer(0)]],
    device float* to [[buffer(1)]],
    constant Blocks& n [[buffer(2)]],
    uint c [[thread_position_in_grid]])
{
    if (c < n.columns) {
        float sum = n.add ? to[c] : 0.0f;
        for (uint block = 0; block < n.blocks; ++block) {
            sum += partial[ulong(block) * n.stride + n.offset + c];
        }
        to[c] = sum;
    }
}

instantiate_types("rms_norm", rms_norm)
instantiate_types("rms_norm_add", rms_norm_add)
instantiate_types("rms_norm_backward", rms_norm_backward)
