// Elements live or die by a word of a Philox stream at their address; the backward finds the same ones. A thread makes four.

struct Dropped {
    uint count;
    // The stream: its key, and the two upper words of the counter.
    uint key0;
    uint key1;
    uint position;
    uint high;
    // A word below this drops its element; the others are multiplied by scale.
    uint threshold;
    float scale;
    uint add;
};

template <typename T>
kernel void dropout(
    device const T* x [[buffer(0)]],
    device T* y [[buffer(1)]],
    constant Dropped& n [[buffer(2)]],
    uint block [[thread_position_in_grid]])
{
    uint4 words = philox4x32(uint4(block, n.position, n.high, 0), uint2(n.key0, n.key1));
    for (uint j = 0; j < 4; ++j) {
        ulong i = ulong(block) * 4 + j;
        if (i < n.count) {
            // A dropped element is zero even where x is not finite.
            store(y[i], words[j] < n.threshold ? 0.0f : number(x[i]) * n.scale, n.add);
        }
    }
}

instantiate_types("dropout", dropout)
