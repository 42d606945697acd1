// Table look-up, a threadgroup a token, and its scatter, a threadgroup a table row that has tokens.

struct Columns { uint columns; };

template <typename T>
kernel void embed(
    device const T* table [[buffer(0)]],
    device const uint* ids [[buffer(1)]],
    device T* y [[buffer(2)]],
    constant Columns& n [[buffer(3)]],
    uint token [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]])
{
    device const T* from = table + ulong(ids[token]) * n.columns;
    device T* to = y + ulong(token) * n.columns;
    for (uint c = thread_index; c < n.columns; c += 256) {
        to[c] = from[c];
    }
}

// Tokens order[starts[g]..starts[g + 1]] all have the id rows[g]; they are added one after the other, in this order.
template <typename T>
kernel void embed_backward(
    device const uint* order [[buffer(0)]],
    device const uint* starts [[buffer(1)]],
    device const uint* rows [[buffer(2)]],
    device const T* dy [[buffer(3)]],
    device float* dtable [[buffer(4)]],
    constant Columns& n [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]])
{
    device float* to = dtable + ulong(rows[group]) * n.columns;
    uint first = starts[group], end = starts[group + 1];
    for (uint c = thread_index; c < n.columns; c += 256) {
        float sum = to[c];
        for (uint i = first; i < end; ++i) {
            sum += number(dy[ulong(order[i]) * n.columns + c]);
        }
        to[c] = sum;
    }
}

instantiate_types("embed", embed)
instantiate_types("embed_backward", embed_backward)
