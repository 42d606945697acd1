// Weights of any format to f32: whole matrices, and rows of a table. A threadgroup has a row.

struct Rows { uint columns; uint row_bytes; };

template <typename F>
inline void unpack_row(device const uchar* row, device float* y, uint columns, uint thread_index) {
    for (uint at = thread_index * 8; at < columns; at += 128 * 8) {
        float w[8];
        F::eight(row, at, columns, w);
        for (uint i = 0; i < 8 && at + i < columns; ++i) {
            y[at + i] = w[i];
        }
    }
}

template <typename F>
kernel void dequantise(
    device const uchar* weights [[buffer(0)]],
    device float* y [[buffer(1)]],
    constant Rows& n [[buffer(2)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]])
{
    unpack_row<F>(weights + ulong(row) * n.row_bytes, y + ulong(row) * n.columns, n.columns, thread_index);
}

template <typename F>
kernel void embed_blocks(
    device const uchar* weights [[buffer(0)]],
    device const uint* ids [[buffer(1)]],
    device float* y [[buffer(2)]],
    constant Rows& n [[buffer(3)]],
    uint token [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]])
{
    unpack_row<F>(weights + ulong(ids[token]) * n.row_bytes, y + ulong(token) * n.columns, n.columns, thread_index);
}

#define instantiate_format(name, format) \
    instantiate("dequantise_" name, dequantise, format) \
    instantiate("embed_blocks_" name, embed_blocks, format)

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
