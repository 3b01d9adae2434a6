// Products of up to 128 rows with a streamed weight, by clusters of programs, for sm_90a. No host headers: NVRTC takes it.
//
// Gated: out = silu(x gate^T) * (x up^T). The programs of a cluster have different columns and the same rows: each brings
// 1/C of every tile of rows and multicasts it to all C, so that a cluster reads the rows once from L2.
// Add: stream += x weight^T. The programs of a cluster have the same columns and each 1/C of the inner dim; fp32 sums go to
// the program that owns the rows, through distributed shared memory, and are added in order of the parts.
//
// A program: 8 warps that multiply (2 warpgroups, 64 rows each), 1 warp whose first thread brings tiles of 64 inputs.
//
// WHAT HOLDS (fill f = 0, 1, .. of a program lies in stage s = f % S and is that stage's use u = f / S):
//  1. full[s] (own program): 1 arrival a phase, of the own bringing thread, with the bytes of the own weight tile and of the
//     WHOLE tile of rows. The C slices of rows come from all programs of the cluster, each counted here by its own copy.
//     A phase ends only with that arrival, so a slice that is here before the arrival only makes the count of bytes negative.
//  2. empty[s] (own program): 8 C arrivals a phase: each multiplying warp of EVERY program of the cluster, once per use, when
//     its matrix instructions that read the stage have ended. It arrives at all C programs.
//  3. Use u >= 1 of stage s is brought (weight, and the slice into all C programs) only behind phase u - 1 of the own
//     empty[s]: then every warp of the cluster has read use u - 1, thus full[s] of every program has ended phase u - 1, and no
//     slice of use u can be counted in an older phase, nor overwrite what is still read. So no barrier is ever more than one
//     phase ahead of who waits for it, and a parity is enough.
//  4. A warp arrives for use u of stage s only if the fill f + S exists. So each arrival at a program is waited for by its
//     bringing thread, and each slice by its warps: when the last thread of a program ends, nothing is on its way to it. No
//     program needs to wait for the cluster at its end.
//  5. Before the first slice and the first arrival at another program: barriers are initialised (fence.mbarrier_init) and
//     the cluster has met (barrier.cluster). The own weight tiles are asked for before that: they concern no one else.
//  6. No waiting cycle: a fill needs earlier fills' reading only, and reading a fill needs that fill of the cluster only.
//  7. Add: no multicast, empty[s] has 8 arrivals of the own warps. Sums go into memory of their own (never a stage) behind
//     the first cluster barrier (all programs are there), are read behind the second one (release/acquire); no one touches
//     another program's memory behind that.
// Programmatic dependent launch: weights are asked for before griddepcontrol.wait; rows, squares, the stream behind it.

typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 opaque[16]; };

// Mma<N>::go: 64 rows by N columns of 16 inputs, added to the sums unless `adds` is 0. Written out behind this text.
template <int N> struct Mma;

namespace {
constexpr int ROWS = 128, TILE_K = 64, LINE = 128;  // LINE: bytes of 64 inputs, one row of a swizzled tile
constexpr int WARPS = 8, THREADS = 32 * (WARPS + 1);
constexpr int X_BYTES = ROWS * LINE;
constexpr u64 X_HINT = 0x1000000000000000ull, W_HINT = 0x1000000000000000ull;  // to L2: keep both as it keeps anything
constexpr u64 LONGEST_NS = 20000000000ull;  // of a wait: no kernel in front takes that long

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u64 now_ns() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }

__device__ __forceinline__ bool is_over(unsigned bar, unsigned parity) {
  unsigned done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}
// Traps instead of hanging for ever.
__device__ __forceinline__ void wait(unsigned bar, unsigned parity) {
#pragma unroll 1
  for (int i = 0; i < 1024; ++i) if (is_over(bar, parity)) return;
  const u64 start = now_ns();
#pragma unroll 1
  while (!is_over(bar, parity)) if (now_ns() - start > LONGEST_NS) __trap();
}
__device__ __forceinline__ void init(unsigned bar, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void expect(unsigned bar, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(unsigned bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
}
__device__ __forceinline__ unsigned at_rank(unsigned address, unsigned rank) {
  unsigned far;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(address), "r"(rank));
  return far;
}
// Of the default scope: what was read was read by the matrix instructions, which have ended; a wider one costs a fence of the
// whole memory a tile.
__device__ __forceinline__ void arrive_far(unsigned far) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(far) : "memory");
}
__device__ __forceinline__ unsigned cluster_rank() { unsigned r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_meet() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }  // hands nothing over
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void grid_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ void copy(unsigned to, const TensorMap* map, int column, int row, unsigned bar, u64 hint) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
               :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(bar), "l"(hint) : "memory");
}
__device__ __forceinline__ void copy_to_all(unsigned to, const TensorMap* map, int column, int row, unsigned bar, unsigned short mask, u64 hint) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;"
               :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(bar), "h"(mask), "l"(hint) : "memory");
}
__device__ __forceinline__ void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory"); }

// A tile of lines of 128 bytes, swizzled by 128 bytes, 8 lines an atom; 16 inputs further is 2 further.
__device__ __forceinline__ u64 tile_description(unsigned address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory"); }

__device__ __forceinline__ unsigned pack(float low, float high) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float low_of(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(unsigned pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// WIDTH: rows of the weight's tile. C: programs that share the tile of rows, 1: each has its own.
template <int WIDTH, int STAGES, int C> struct Stages {
  static constexpr int W_BYTES = WIDTH * LINE;
  static constexpr int BYTES = STAGES * (X_BYTES + W_BYTES) + 2 * STAGES * 8;
  unsigned base;
  __device__ __forceinline__ unsigned x(int s) const { return base + s * X_BYTES; }
  __device__ __forceinline__ unsigned w(int s) const { return base + STAGES * X_BYTES + s * W_BYTES; }
  __device__ __forceinline__ unsigned full(int s) const { return base + STAGES * (X_BYTES + W_BYTES) + s * 8; }
  __device__ __forceinline__ unsigned empty(int s) const { return full(STAGES) + s * 8; }
};

// What one program brings. num_boxes: of the weight's tile, `box_rows` rows each; 0 where its columns are behind the last.
struct Bring {
  const TensorMap* x;
  const TensorMap* w;
  int first_k, steps, row, slice_rows, box_rows, first_box, second_box, num_boxes;
};

template <class St, int STAGES, int C> __device__ __forceinline__ void bring_weight(const St& st, const Bring& b, int s, int f) {
  const int k = b.first_k + f * TILE_K;
  const unsigned box_bytes = b.box_rows * LINE;
  expect(st.full(s), b.num_boxes * box_bytes + C * b.slice_rows * LINE);
  if (b.num_boxes > 0) copy(st.w(s), b.w, k, b.first_box, st.full(s), W_HINT);
  if (b.num_boxes > 1) copy(st.w(s) + box_bytes, b.w, k, b.second_box, st.full(s), W_HINT);
}
template <class St, int STAGES, int C> __device__ __forceinline__ void bring_rows(const St& st, const Bring& b, int s, int f, unsigned rank) {
  const int k = b.first_k + f * TILE_K;
  if (C == 1) copy(st.x(s), b.x, k, b.row, st.full(s), X_HINT);
  else copy_to_all(st.x(s) + rank * b.slice_rows * LINE, b.x, k, b.row + rank * b.slice_rows, st.full(s), (unsigned short)((1 << C) - 1), X_HINT);
}

// The bringing thread, before the cluster meets: barriers, and the weight's tiles that there is room for.
template <class St, int STAGES, int C> __device__ __forceinline__ void begin(const St& st, const Bring& b) {
  for (int s = 0; s < STAGES; ++s) {
    init(st.full(s), 1);
    init(st.empty(s), WARPS * C);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  grid_launch();
  for (int f = 0; f < STAGES && f < b.steps; ++f) bring_weight<St, STAGES, C>(st, b, f, f);
}
// The bringing thread, behind that.
template <class St, int STAGES, int C> __device__ __forceinline__ void bring_all(const St& st, const Bring& b, unsigned rank) {
  grid_wait();
  for (int f = 0; f < STAGES && f < b.steps; ++f) bring_rows<St, STAGES, C>(st, b, f, f, rank);
  int s = 0;
  unsigned parity = 0;  // of the use before, which the stage must be rid of
#pragma unroll 1
  for (int f = STAGES; f < b.steps; ++f) {
    wait(st.empty(s), parity);
    bring_weight<St, STAGES, C>(st, b, s, f);
    bring_rows<St, STAGES, C>(st, b, s, f, rank);
    if (++s == STAGES) { s = 0; parity ^= 1; }
  }
}

// A warp's arrival at the stage in every program of the cluster. far_empty: empty(0) of the program of the lane's number.
template <class St, int C> __device__ __forceinline__ void release(const St& st, int s, unsigned lane, unsigned far_empty) {
  if (C == 1) { if (lane == 0) arrive(st.empty(s)); }
  else if (lane < C) arrive_far(far_empty + s * 8);
}

// A multiplying warpgroup: fp32 sums of its 64 rows.
template <class St, int WIDTH, int STAGES, int C>
__device__ __forceinline__ void multiply(const St& st, float (&sums)[WIDTH / 2], int steps, int group, bool is_active) {
  const unsigned lane = threadIdx.x & 31;
  const unsigned far_empty = C == 1 ? 0 : at_rank(st.empty(0), lane < C ? lane : 0);
  int s = 0;
  unsigned parity = 0;
#pragma unroll 1
  for (int f = 0; f < steps; ++f) {
    wait(st.full(s), parity);
    const int before = s == 0 ? STAGES - 1 : s - 1;
    if (is_active) {
      const u64 a = tile_description(st.x(s) + group * 64 * LINE), b = tile_description(st.w(s));
      mma_fence();
#pragma unroll
      for (int k = 0; k < TILE_K / 16; ++k) Mma<WIDTH>::go(sums, a + 2 * k, b + 2 * k, (f | k) != 0);
      mma_commit();
      mma_wait<1>();
    }
    __syncwarp();
    if (f > 0 && f - 1 + STAGES < steps) release<St, C>(st, before, lane, far_empty);
    if (++s == STAGES) { s = 0; parity ^= 1; }
  }
  mma_wait<0>();
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) asm volatile("" : "+f"(sums[i]) :: "memory");
}
}  // namespace
