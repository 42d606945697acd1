// The element-wise parts of a low-rank correction; its products are matrix products. B spread over the layer's outputs is a
// matrix (out, S r), zero where a part has no share.

struct Spreading { uint count; uint ranks; uint rank; };
struct Gathering { uint count; uint ranks; uint rank; float scale; uint add; };
struct Merging { uint count; float scale; };
struct Scaling { uint count; float scale; uint add; };

constant uint NONE = 0xFFFFFFFF;

// `places` has a row of B and a segment for each output, or none.
kernel void lora_spread(
    device const float* b [[buffer(0)]],
    device const uint* places [[buffer(1)]],
    device float* spread [[buffer(2)]],
    constant Spreading& n [[buffer(3)]],
    uint i [[thread_position_in_grid]])
{
    if (i < n.count) {
        uint column = i / n.ranks, j = i % n.ranks, row = places[2 * column];
        spread[i] = row != NONE && j / n.rank == places[2 * column + 1] ? b[row * n.rank + j % n.rank] : 0.0f;
    }
}

// The way back: `places` has an output and a segment for each row of B.
kernel void lora_gather(
    device const float* dspread [[buffer(0)]],
    device const uint* places [[buffer(1)]],
    device float* db [[buffer(2)]],
    constant Gathering& n [[buffer(3)]],
    uint i [[thread_position_in_grid]])
{
    if (i < n.count) {
        uint row = i / n.rank, at = places[2 * row] * n.ranks + places[2 * row + 1] * n.rank + i % n.rank;
        store(db[i], n.scale * dspread[at], n.add);
    }
}

// The weight with the correction: w + scale p.
kernel void lora_merge(
    device const float* w [[buffer(0)]],
    device const float* p [[buffer(1)]],
    device float* merged [[buffer(2)]],
    constant Merging& n [[buffer(3)]],
    uint i [[thread_position_in_grid]])
{
    if (i < n.count) {
        merged[i] = fma(n.scale, p[i], w[i]);
    }
}

kernel void lora_scale(
    device const float* x [[buffer(0)]],
    device float* to [[buffer(1)]],
    constant Scaling& n [[buffer(2)]],
    uint i [[thread_position_in_grid]])
{
    if (i < n.count) {
        store(to[i], n.scale * x[i], n.add);
    }
}
