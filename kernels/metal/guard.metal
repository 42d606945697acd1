// One thread decides whether the step may change the weights, as src/ops/guard.rs does on the CPU. The order of the scalars is
// that of src/ops/scalars.rs.

struct Guard { float max_norm; float spike_threshold; float observe; };

constant uint LOSS = 1;
constant uint GRADIENT_NORM = 2;
constant uint CLIP = 3;
constant uint SKIP = 4;
constant uint UPDATES = 5;
constant uint LOSS_MEAN = 7;
constant uint NORM_MEAN = 9;
constant uint OBSERVED = 11;

inline bool spikes(float x, float mean, float variance, float threshold) {
    // The floor keeps a plateau, whose variance is nearly nothing, from making a spike of any ripple.
    return x - mean > threshold * max(sqrt(variance), 0.01f * fabs(mean));
}

inline void observe(device float* s, uint mean, float x, float share) {
    float off = x - s[mean];
    s[mean] += share * off;
    // Bounded, so that one huge value does not make every later one ordinary for ever.
    s[mean + 1] = (1.0f - share) * (s[mean + 1] + share * min(off * off, 1e30f));
}

kernel void guard_decide(
    device float* scalars [[buffer(0)]],
    constant Guard& n [[buffer(1)]],
    uint i [[thread_position_in_grid]])
{
    if (i > 0) {
        return;
    }
    device float* s = scalars;
    float loss = s[LOSS], norm = s[GRADIENT_NORM];
    bool ready = n.spike_threshold > 0.0f && s[OBSERVED] >= n.observe;
    bool spike = spikes(loss, s[LOSS_MEAN], s[LOSS_MEAN + 1], n.spike_threshold)
        || spikes(norm, s[NORM_MEAN], s[NORM_MEAN + 1], n.spike_threshold);
    bool skip = !isfinite(loss) || !isfinite(norm) || (ready && spike);
    s[SKIP] = skip ? 1.0f : 0.0f;
    s[CLIP] = n.max_norm > 0.0f && norm > n.max_norm ? n.max_norm / norm : 1.0f;
    if (!skip) {
        s[OBSERVED] += 1.0f;
        // A plain average of the first steps, then a running one.
        float share = max(1.0f / s[OBSERVED], 0.02f);
        observe(s, LOSS_MEAN, loss, share);
        observe(s, NORM_MEAN, norm, share);
    }
}

// Counts the update, if there was one.
kernel void guard_finish(
    device float* scalars [[buffer(0)]],
    uint i [[thread_position_in_grid]])
{
    if (i == 0 && scalars[SKIP] == 0.0f) {
        scalars[UPDATES] += 1.0f;
    }
}
