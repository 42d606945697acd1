// The norm over tensors: first the norm of each piece of 4,096 numbers, a threadgroup a piece, then that of the pieces' norms.
// Norms are scaled by the largest number in them, so that nothing overflows; what is not finite stays visible.

struct Piece { uint count; };
struct Norms { uint count; uint place; };

constant uint PIECE = 4096;

// m sqrt(sum (x / m)^2) over the threadgroup, m being the largest |x| of it.
inline float norm_of_group(
    device const float* x, uint first, uint end, threadgroup float* shared, uint thread_index, uint lane, uint simdgroup)
{
    float most = 0.0f, odd = 0.0f;
    for (uint i = first + thread_index; i < end; i += 256) {
        most = max(most, fabs(x[i]));
        odd += isfinite(x[i]) ? 0.0f : 1.0f;
    }
    most = max_of_group(most, shared, lane, simdgroup, 8);
    odd = sum_of_group(odd, shared, lane, simdgroup, 8);
    float sum = 0.0f;
    for (uint i = first + thread_index; i < end; i += 256) {
        float part = most > 0.0f ? x[i] / most : 0.0f;
        sum = fma(part, part, sum);
    }
    sum = sum_of_group(sum, shared, lane, simdgroup, 8);
    return odd > 0.0f ? as_type<float>(0x7FC00000u) : most * sqrt(sum);
}

kernel void norm_of_pieces(
    device const float* x [[buffer(0)]],
    device float* norms [[buffer(1)]],
    constant Piece& n [[buffer(2)]],
    uint piece [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float shared[32];
    uint first = piece * PIECE, end = min(first + PIECE, n.count);
    float norm = norm_of_group(x, first, end, shared, thread_index, lane, simdgroup);
    if (thread_index == 0) {
        norms[piece] = norm;
    }
}

kernel void norm_of_norms(
    device const float* norms [[buffer(0)]],
    device float* to [[buffer(1)]],
    constant Norms& n [[buffer(2)]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]])
{
    threadgroup float shared[32];
    float norm = norm_of_group(norms, 0, n.count, shared, thread_index, lane, simdgroup);
    if (thread_index == 0) {
        to[n.place] = norm;
    }
}
