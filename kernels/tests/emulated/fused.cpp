// The fused kernels on an emulated GPU against their definition in double precision, rounded where they round.

#include "emulate.h"

#include "prelude.h"

#include "fused_common.h"
#include "fused_norm.cu"
#include "fused_pairs.cu"
#include "fused_loss.cu"

using emulation::launch;

static int failures = 0;

static void fail(const char *what, size_t at, double found, double expected) {
    if (failures++ < 20) printf("%s: element %zu is %.9g, expected %.9g\n", what, at, found, expected);
}

// Numbers from -1 to 1, the same in every run.
static double random_number() {
    static u64 state = 42;
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(state >> 11) / (double)(1ull << 52) - 1.0;
}

static double round_to(Bf16, double x) { return from_bf16(to_bf16((float)x)); }
static double round_to(Fp32, double x) { return (float)x; }
// Half a unit in the last place, relative.
static double unit(Bf16) { return 1.0 / 256; }
static double unit(Fp32) { return 1.0 / (1 << 24); }

// A buffer between two guards, at an address that is (`shift` 0) or is not aligned for wide accesses.
template <class Type>
struct Buffer {
    typedef typename Type::Stored Stored;
    enum { GUARD = 64 };
    std::vector<Stored> all;
    size_t size, start;

    Buffer(size_t size, double scale = 0.0, size_t shift = 0) : all(size + 2 * GUARD + 8), size(size) {
        start = GUARD;
        while ((size_t)(&all[start]) % 16 != 0) start++;
        start += shift;
        for (auto &x : all) x = Type::stored(77.0f);
        for (size_t i = 0; i < size; i++) at(i) = Type::stored((float)(scale * random_number()));
    }
    Stored &at(size_t i) { return all[start + i]; }
    Stored *data() { return &all[start]; }
    double operator[](size_t i) { return Type::value(at(i)); }
    void check_guards(const char *what) {
        for (size_t i = 0; i < all.size(); i++) {
            if ((i < start || i >= start + size) && Type::value(all[i]) != 77.0f) {
                fail(what, i, Type::value(all[i]), 77.0);
                return;
            }
        }
    }
};

// Tolerance: `units` half units in the last place of the expected number, and as many of `scale` for cancellation.
template <class Type>
static void expect(const char *what, Buffer<Type> &found, size_t i, double expected, double units, double scale) {
    double tolerance = units * unit(Type()) * (fabs(expected) + 1e-30) + scale * 4e-6;
    if (!(fabs(found[i] - expected) <= tolerance)) fail(what, i, found[i], expected);
}

static u32 threads_for(u32 columns, u32 lanes, u32 chunks, u32 most) {
    u32 threads = (columns / lanes + 32 * chunks - 1) / (32 * chunks) * 32;
    return threads < 32 ? 32 : threads > most ? most : threads;
}

template <class Type, int N>
static void check_norm(u32 rows, u32 columns, bool with_other, size_t shift) {
    const char *name = N == 1 ? "norm, each" : "norm, wide";
    u32 threads = threads_for(columns, N, KEPT, 512), threads_backward = threads_for(columns, N, KEPT_BACKWARD, 1024);
    size_t elems = (size_t)rows * columns;
    Buffer<Type> x(elems, 2.0, shift), added(elems, 1.0, shift), weight(columns, 1.5, shift), sum(elems, 0, shift),
        out(elems, 0, shift);
    Buffer<Fp32> scale(rows);
    const float eps = 1e-5f;
    launch(rows, threads, [&] {
        rms_norm<Type, N>(x.data(), with_other ? added.data() : nullptr, weight.data(),
                          with_other ? sum.data() : nullptr, out.data(), scale.data(), columns, eps);
    });
    Buffer<Type> &normed = with_other ? sum : x;
    for (u32 r = 0; r < rows; r++) {
        double squares = 0.0;
        for (u32 c = 0; c < columns; c++) {
            size_t i = (size_t)r * columns + c;
            if (with_other) expect(name, sum, i, round_to(Type(), x[i] + added[i]), 0.0, 0.0);
            squares += normed[i] * normed[i];
        }
        double s = 1.0 / sqrt(squares / columns + eps);
        expect(name, scale, r, s, 8.0, 0.0);
        for (u32 c = 0; c < columns; c++) {
            size_t i = (size_t)r * columns + c;
            // Two roundings, each of which may go in the other direction.
            expect(name, out, i, round_to(Type(), round_to(Type(), normed[i] * s) * weight[c]), 6.0, 0.0);
        }
    }

    Buffer<Type> grad(elems, 1.0, shift), beside(elems, 3.0, shift), grad_x(elems, 0, shift), grad_weight(columns);
    u32 rows_each = rows > 4 ? 3 : 1, part_count = (rows + rows_each - 1) / rows_each;
    Buffer<Fp32> parts((size_t)part_count * columns);
    launch(part_count, threads_backward, [&] {
        rms_norm_backward<Type, N>(grad.data(), normed.data(), weight.data(), scale.data(),
                                   with_other ? beside.data() : nullptr, grad_x.data(), parts.data(), rows, rows_each,
                                   columns);
    });
    launch((columns + 31) / 32, 1024,
           [&] { sum_parts<Type>(parts.data(), grad_weight.data(), part_count, columns); });
    std::vector<double> weight_sums(columns), weight_sizes(columns);
    for (u32 r = 0; r < rows; r++) {
        double s = scale[r], along = 0.0;
        for (u32 c = 0; c < columns; c++) {
            size_t i = (size_t)r * columns + c;
            along += round_to(Type(), grad[i] * weight[c]) * normed[i];
            double more = grad[i] * round_to(Type(), normed[i] * s);
            weight_sums[c] += more;
            weight_sizes[c] += fabs(more);
        }
        for (u32 c = 0; c < columns; c++) {
            size_t i = (size_t)r * columns + c;
            double q = round_to(Type(), grad[i] * weight[c]);
            double dx = q * s - normed[i] * along * s * s * s / columns;
            if (with_other) {
                expect(name, grad_x, i, round_to(Type(), round_to(Type(), dx) + beside[i]), 2.0,
                       3.0 * unit(Type()) / 4e-6);
            } else {
                expect(name, grad_x, i, dx, 2.0, 3.0);
            }
        }
    }
    for (u32 c = 0; c < columns; c++) expect(name, grad_weight, c, weight_sums[c], 2.0, weight_sizes[c]);
    for (auto *buffer : {&x, &added, &weight, &sum, &out, &grad, &beside, &grad_x, &grad_weight}) {
        buffer->check_guards(name);
    }
    scale.check_guards(name);
    parts.check_guards(name);
}

template <class Type, int N>
static void check_rotary(u32 half) {
    const char *name = N == 1 ? "rotary, each" : "rotary, wide";
    const u32 sequences = 2, tokens = 5, heads = 3, width = 2 * half;
    // Heads within rows of five, in the layout of query and key in a product of three; the target in the layout of attention's gradients.
    Buffer<Type> from(sequences * tokens * 5 * width, 2.0), to(sequences * tokens * heads * width);
    Buffer<Type> cosines(7 * width), sines(7 * width);
    for (u32 p = 0; p < 7; p++) {
        for (u32 i = 0; i < width; i++) {
            double angle = p * pow(100.0, -2.0 * (i % half) / width);
            cosines.at(p * width + i) = Type::stored((float)cos(angle));
            sines.at(p * width + i) = Type::stored((float)sin(angle));
        }
    }
    Places source = {tokens * 5 * width, 5 * width, width};
    Places target = {tokens * heads * width, width, tokens * width};
    u32 count = sequences * tokens * heads * (half / N);
    for (float turn : {1.0f, -1.0f, 0.0f}) {
        launch((count + 255) / 256, 256, [&] {
            rotary<Type, N>(from.data(), to.data(), cosines.data(), sines.data(), source, target, tokens, heads, half,
                            count, turn);
        });
        for (u32 s = 0; s < sequences; s++)
            for (u32 t = 0; t < tokens; t++)
                for (u32 h = 0; h < heads; h++)
                    for (u32 i = 0; i < half; i++) {
                        size_t in = s * source.sequence + t * source.token + h * source.head + i;
                        size_t out = s * target.sequence + t * target.token + h * target.head + i;
                        double a = from[in], b = from[in + half];
                        double cosine = turn == 0.0f ? 1.0 : cosines[t * width + i];
                        double sine = turn * sines[t * width + i];
                        auto r = [](double x) { return round_to(Type(), x); };
                        expect(name, to, out, r(r(a * cosine) - r(b * sine)), 0.0, 0.0);
                        expect(name, to, out + half, r(r(b * cosine) + r(a * sine)), 0.0, 0.0);
                    }
    }
    to.check_guards(name);
    // In place, as query and key are rotated.
    Buffer<Type> kept = from;
    launch((count + 255) / 256, 256, [&] {
        rotary<Type, N>(kept.data(), kept.data(), cosines.data(), sines.data(), source, source, tokens, heads, half,
                        count, 1.0f);
    });
    for (u32 row = 0; row < sequences * tokens; row++) {
        for (u32 i = 0; i < 5 * width; i++) {
            size_t at = row * 5 * width + i;
            if (i >= heads * width) expect(name, kept, at, from[at], 0.0, 0.0);
        }
        double a = from[row * 5 * width], b = from[row * 5 * width + half], t = row % tokens;
        double turned = round_to(Type(), a * cosines[(size_t)t * width]) -
                        round_to(Type(), b * sines[(size_t)t * width]);
        expect(name, kept, row * 5 * width, round_to(Type(), turned), 0.0, 0.0);
    }
}

template <class Type, int N>
static void check_gated(u32 rows, u32 columns, size_t shift) {
    const char *name = N == 1 ? "gated, each" : "gated, wide";
    size_t elems = (size_t)rows * columns;
    Buffer<Type> gate_up(2 * elems, 6.0, shift), out(elems, 0, shift), grad(elems, 1.0, shift);
    // Values at which an exponential overflows or vanishes.
    const float extremes[] = {-200.0f, 200.0f, -89.0f, 89.0f, 0.0f};
    for (int i = 0; i < 5; i++) gate_up.at(i) = Type::stored(extremes[i]);
    u64 count = elems / N;
    launch((count + 255) / 256, 256, [&] { gated<Type, N>(gate_up.data(), out.data(), columns, count); });
    Buffer<Type> before = gate_up, grad_before = grad;
    launch((count + 255) / 256, 256, [&] { gated_backward<Type, N>(grad.data(), gate_up.data(), columns, count); });
    for (u32 r = 0; r < rows; r++) {
        for (u32 c = 0; c < columns; c++) {
            size_t i = (size_t)r * columns + c, g = (size_t)r * 2 * columns + c, u = g + columns;
            double gate = before[g], up = before[u], upstream = grad_before[i];
            double sigmoid = 1.0 / (1.0 + exp(-gate)), silu = round_to(Type(), gate * sigmoid);
            expect(name, out, i, round_to(Type(), silu * up), 4.0, 1e-30);
            if (grad[i] != out[i]) fail("gated backward gives the product again", i, grad[i], out[i]);
            expect(name, gate_up, u, upstream * silu, 4.0, 1e-30);
            double slope = sigmoid * (1.0 + gate * (1.0 - sigmoid));
            expect(name, gate_up, g, round_to(Type(), upstream * up) * slope, 3.0, fabs(upstream * up));
        }
    }
    for (auto *buffer : {&gate_up, &out, &grad}) buffer->check_guards(name);
}

template <class Type, int N>
static void check_loss(u32 rows, u32 columns, u32 threads) {
    const char *name = N == 1 ? "loss, each" : "loss, wide";
    Buffer<Type> logits((size_t)rows * columns, 8.0);
    Buffer<Fp32> losses(rows);
    std::vector<long long> targets(rows);
    const double weight = 0.03;
    for (u32 r = 0; r < rows; r++) {
        targets[r] = r == 1 ? -100 : (long long)(r * 31 % columns);
        // Rows with infinities, with large numbers, with the largest first and last.
        if (r == 2) {
            for (u32 c = 0; c < columns / 2; c++) logits.at(r * columns + c) = Type::stored(-INFINITY);
            targets[r] = columns - 1;
        }
        if (r == 3) for (u32 c = 0; c < columns; c++) logits.at(r * columns + c) = Type::stored((float)(c % 7) * 3e4f);
        if (r == 4) logits.at(r * columns) = Type::stored(60.0f);
        if (r == 5) logits.at(r * columns + columns - 1) = Type::stored(60.0f);
        if (r == 6) logits.at(r * columns + columns / 2) = Type::stored(NAN);
    }
    Buffer<Type> before = logits;
    for (u32 with_gradient : {0u, 1u}) {
        launch(rows, threads, [&] {
            cross_entropy<Type, N>(logits.data(), targets.data(), losses.data(), columns, with_gradient,
                                   (float)weight);
        });
        for (u32 r = 0; r < rows; r++) {
            size_t row = (size_t)r * columns;
            if (r == 6) {
                if (!std::isnan(losses[r])) fail("the loss of a row with NaN", r, losses[r], NAN);
                continue;
            }
            double largest = -INFINITY, sum = 0.0;
            for (u32 c = 0; c < columns; c++) largest = fmax(largest, before[row + c]);
            for (u32 c = 0; c < columns; c++) sum += exp(before[row + c] - largest);
            bool counts = targets[r] >= 0;
            double loss = counts ? log(sum) + largest - before[row + targets[r]] : 0.0;
            expect(name, losses, r, loss, 8.0, 1.0);
            for (u32 c = 0; c < columns; c++) {
                if (!with_gradient) {
                    if (logits.at(row + c) != before.at(row + c)) fail("logits without gradient", c, logits[row + c], 0);
                    continue;
                }
                double share = exp(before[row + c] - largest) / sum;
                double expected = counts ? (share - (c == targets[r])) * weight : 0.0;
                expect(name, logits, row + c, expected, 2.0, counts ? weight : 0.0);
            }
        }
    }
    logits.check_guards(name);
    losses.check_guards(name);
}

static void check_functions() {
    double exp_error = 0.0, log_error = 0.0;
    for (int i = 0; i < 2000000; i++) {
        float x = (float)(random_number() * 87.0), y = expf((float)(random_number() * 80.0));
        exp_error = fmax(exp_error, fabs(exp_f32(x) / exp((double)x) - 1.0));
        double l = log((double)y);
        log_error = fmax(log_error, fabs(log_f32(y) - l) / fmax(fabs(l), 1e-3));
    }
    // 2 units in the last place; near 1 the logarithm's error is relative to x - 1.
    if (!(exp_error < 2.5e-7)) fail("exp", 0, exp_error, 0.0);
    if (!(log_error < 2.5e-7)) fail("log", 0, log_error, 0.0);
    const float edges[] = {-INFINITY, -200.0f, -104.0f, -103.0f, -90.0f, 0.0f, 88.7f, 89.0f, INFINITY};
    for (float x : edges) {
        float expected = expf(x), found = exp_f32(x);
        // Denormals to within one.
        if (!(found == expected || fabs((double)found / expected - 1.0) < 3e-7 || fabs((double)found - expected) < 3e-45))
            fail("exp at an edge", 0, found, expected);
    }
    if (!std::isnan(exp_f32(NAN)) || !std::isnan(log_f32(NAN))) fail("NaN", 0, 0, NAN);
    if (log_f32(1.0f) != 0.0f) fail("log of 1", 0, log_f32(1.0f), 0.0);
}

int main() {
    check_functions();
    printf("exp and log checked\n");
    for (bool with_other : {false, true}) {
        for (u32 columns : {8u, 264u, 8264u, 16648u}) check_norm<Bf16, 8>(7, columns, with_other, 0);
        for (u32 columns : {4u, 260u, 4100u, 8452u}) check_norm<Fp32, 4>(7, columns, with_other, 0);
        for (u32 columns : {1u, 37u, 1100u, 2300u}) {
            check_norm<Bf16, 1>(4, columns, with_other, 1);
            check_norm<Fp32, 1>(8, columns, with_other, 1);
        }
    }
    printf("norms checked\n");
    check_rotary<Bf16, 8>(16);
    check_rotary<Bf16, 1>(3);
    check_rotary<Fp32, 4>(8);
    check_rotary<Fp32, 1>(5);
    printf("rotary checked\n");
    check_gated<Bf16, 8>(9, 40, 0);
    check_gated<Bf16, 1>(9, 37, 1);
    check_gated<Fp32, 4>(9, 36, 0);
    check_gated<Fp32, 1>(9, 37, 1);
    printf("gated checked\n");
    check_loss<Bf16, 8>(9, 1000, 64);
    check_loss<Bf16, 1>(9, 301, 64);
    check_loss<Fp32, 4>(9, 1000, 32);
    check_loss<Fp32, 1>(9, 11, 64);
    printf("loss checked\n");
    if (failures > 0) printf("%d wrong\n", failures);
    return failures > 0;
}
