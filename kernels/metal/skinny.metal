// Products of a few rows x with a weight (outputs, columns) of any format: the products of decoding.
//
// A simdgroup has PACK rows of the weight, so that they share what is read of x, and R rows of x. A threadgroup has four of
// them, which never meet: the kernels have no barrier and no threadgroup memory. Threadgroups with the same weights and other
// rows of x are neighbours, so that they find the weights in the cache. An output is the sum of 32 lanes, each of which adds up
// its columns, eight of every 256, in their order and by fma: no bit depends on R, on the other rows, or on the row's place
// among them. This takes a compiler that keeps to the order: no fast math.
//
// The norm is folded in: x times the gain is multiplied, and the sum divided by the root mean square of x, whose squares each
// simdgroup adds up on its way.

#define PACK 4

struct Normed { uint rows; uint outputs; uint columns; uint row_bytes; uint selected; float eps; };
struct Residual { uint rows; uint outputs; uint columns; uint row_bytes; };

struct Pack { device const uchar* row[PACK]; };

template <uint R>
struct Inputs { device const float* row[R]; };

template <uint R>
struct Sums { float products[R][PACK]; float squares[R]; };

// The lane's part of the sums.
template <typename F, uint R, bool NORM>
inline Sums<R> sums_of_lane(Pack weights, Inputs<R> x, device const float* norm, uint columns, uint lane) {
    Sums<R> sums;
    UNROLL for (uint r = 0; r < R; ++r) {
        sums.squares[r] = 0.0f;
        UNROLL for (uint p = 0; p < PACK; ++p) {
            sums.products[r][p] = 0.0f;
        }
    }
    for (uint at = lane * 8; at < columns; at += 256) {
        float w[PACK][8], gain[8];
        UNROLL for (uint p = 0; p < PACK; ++p) {
            F::eight(weights.row[p], at, columns, w[p]);
        }
        if (NORM) {
            load_eight(norm, at, columns, gain);
        }
        UNROLL for (uint r = 0; r < R; ++r) {
            float v[8];
            load_eight(x.row[r], at, columns, v);
            UNROLL for (uint i = 0; i < 8; ++i) {
                if (NORM) {
                    sums.squares[r] = fma(v[i], v[i], sums.squares[r]);
                    v[i] = v[i] * gain[i];
                }
                UNROLL for (uint p = 0; p < PACK; ++p) {
                    sums.products[r][p] = fma(v[i], w[p][i], sums.products[r][p]);
                }
            }
        }
    }
    return sums;
}

// Rows of x from `first` on. Past the last one it comes again: whatever is computed of it is dropped.
template <uint R>
inline Inputs<R> rows_of(device const float* x, uint first, uint rows, uint columns) {
    Inputs<R> inputs;
    UNROLL for (uint r = 0; r < R; ++r) {
        inputs.row[r] = x + ulong(min(first + r, rows - 1)) * columns;
    }
    return inputs;
}

template <uint R>
inline Inputs<R> selected_rows(device const float* x, device const uint* select, uint first, constant Normed& n) {
    if (!n.selected) {
        return rows_of<R>(x, first, n.rows, n.columns);
    }
    Inputs<R> inputs;
    UNROLL for (uint r = 0; r < R; ++r) {
        inputs.row[r] = x + ulong(select[min(first + r, n.rows - 1)]) * n.columns;
    }
    return inputs;
}

// Row `output` of a weight, or its last one.
inline device const uchar* weight_row(device const uchar* weights, uint output, uint outputs, uint row_bytes) {
    return weights + ulong(min(output, outputs - 1)) * row_bytes;
}

// 1 / rms of the lane's row, whose places among the outputs of a pack are `width` lanes. All lanes must call.
template <uint R>
inline float factor_of_lane(Sums<R> sums, constant Normed& n, uint width, uint lane) {
    float squares = 0.0f;
    UNROLL for (uint r = 0; r < R; ++r) {
        float total = simd_sum(sums.squares[r]);
        squares = lane / width == r ? total : squares;
    }
    return 1.0f / sqrt(squares / float(n.columns) + n.eps);
}

// The sum of row lane / PACK with weight lane % PACK. All lanes must call.
template <uint R>
inline float product_of_lane(Sums<R> sums, uint lane) {
    float own = 0.0f;
    UNROLL for (uint r = 0; r < R; ++r) {
        UNROLL for (uint p = 0; p < PACK; ++p) {
            float total = simd_sum(sums.products[r][p]);
            own = lane == r * PACK + p ? total : own;
        }
    }
    return own;
}

// y = norm(x) W^T; row i of y is of row select[i] of x.
template <typename F, uint R>
kernel void norm_product(
    device const float* x [[buffer(0)]],
    device const float* norm [[buffer(1)]],
    device const uint* select [[buffer(2)]],
    device const uchar* weights [[buffer(3)]],
    device float* y [[buffer(4)]],
    constant Normed& n [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    uint first = group.x * R, output = (group.y * 4 + simdgroup) * PACK;
    if (output >= n.outputs) {
        return;
    }
    Pack pack;
    UNROLL for (uint p = 0; p < PACK; ++p) {
        pack.row[p] = weight_row(weights, output + p, n.outputs, n.row_bytes);
    }
    Inputs<R> inputs = selected_rows<R>(x, select, first, n);
    Sums<R> sums = sums_of_lane<F, R, true>(pack, inputs, norm, n.columns, lane);
    float product = product_of_lane<R>(sums, lane) * factor_of_lane<R>(sums, n, PACK, lane);
    uint row = first + lane / PACK;
    output += lane % PACK;
    if (lane < R * PACK && row < n.rows && output < n.outputs) {
        y[ulong(row) * n.outputs + output] = product;
    }
}

// y += x W^T.
template <typename F, uint R>
kernel void residual_product(
    device const float* x [[buffer(0)]],
    device const uchar* weights [[buffer(1)]],
    device float* y [[buffer(2)]],
    constant Residual& n [[buffer(3)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    uint first = group.x * R, output = (group.y * 4 + simdgroup) * PACK;
    if (output >= n.outputs) {
        return;
    }
    Pack pack;
    UNROLL for (uint p = 0; p < PACK; ++p) {
        pack.row[p] = weight_row(weights, output + p, n.outputs, n.row_bytes);
    }
    Inputs<R> inputs = rows_of<R>(x, first, n.rows, n.columns);
    Sums<R> sums = sums_of_lane<F, R, false>(pack, inputs, x, n.columns, lane);
    float product = product_of_lane<R>(sums, lane);
    uint row = first + lane / PACK;
    output += lane % PACK;
    if (lane < R * PACK && row < n.rows && output < n.outputs) {
        y[ulong(row) * n.outputs + output] += product;
    }
}

// y = silu(norm(x) gate^T) norm(x) up^T. Half of a pack are rows of the gate, the other half the same ones of up.
template <typename F, uint R>
kernel void gate_up_product(
    device const float* x [[buffer(0)]],
    device const float* norm [[buffer(1)]],
    device const uint* select [[buffer(2)]],
    device const uchar* gate [[buffer(3)]],
    device const uchar* up [[buffer(4)]],
    device float* y [[buffer(5)]],
    constant Normed& n [[buffer(6)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    const uint HALF = PACK / 2;
    uint first = group.x * R, output = (group.y * 4 + simdgroup) * HALF;
    if (output >= n.outputs) {
        return;
    }
    Pack pack;
    UNROLL for (uint p = 0; p < HALF; ++p) {
        pack.row[p] = weight_row(gate, output + p, n.outputs, n.row_bytes);
        pack.row[HALF + p] = weight_row(up, output + p, n.outputs, n.row_bytes);
    }
    Inputs<R> inputs = selected_rows<R>(x, select, first, n);
    Sums<R> sums = sums_of_lane<F, R, true>(pack, inputs, norm, n.columns, lane);
    float g = 0.0f, u = 0.0f;
    UNROLL for (uint r = 0; r < R; ++r) {
        UNROLL for (uint p = 0; p < HALF; ++p) {
            float gates = simd_sum(sums.products[r][p]), ups = simd_sum(sums.products[r][HALF + p]);
            bool mine = lane == r * HALF + p;
            g = mine ? gates : g;
            u = mine ? ups : u;
        }
    }
    float factor = factor_of_lane<R>(sums, n, HALF, lane);
    g *= factor;
    u *= factor;
    uint row = first + lane / HALF;
    output += lane % HALF;
    if (lane < R * HALF && row < n.rows && output < n.outputs) {
        y[ulong(row) * n.outputs + output] = g * sigmoid(g) * u;
    }
}

#define instantiate_format(name, format) \
    instantiate("norm_product_" name "_1", norm_product, format, 1) \
    instantiate("norm_product_" name "_4", norm_product, format, 4) \
    instantiate("norm_product_" name "_8", norm_product, format, 8) \
    instantiate("residual_product_" name "_1", residual_product, format, 1) \
    instantiate("residual_product_" name "_4", residual_product, format, 4) \
    instantiate("residual_product_" name "_8", residual_product, format, 8) \
    instantiate("gate_up_product_" name "_1", gate_up_product, format, 1) \
    instantiate("gate_up_product_" name "_4", gate_up_product, format, 4) \
    instantiate("gate_up_product_" name "_8", gate_up_product, format, 8)

instantiate_format("f32", Plain<float>)
instantiate_format("f16", Plain<half>)
instantiate_format("bf16", Plain<bf16>)
instantiate_format("q8_0", Q8_0)
instantiate_format("q4_0", Q4_0)
instantiate_format("q4_1", Q4_1)
instantiate_format("q5_0", Q5_0)
instantiate_format("q5_1", Q5_1)
instantiate_format("q4_k", Q4_K)
instantiate_format("q6_k", Q6_K)
