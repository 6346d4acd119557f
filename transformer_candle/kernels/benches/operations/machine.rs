//! Measures the machine's peak FLOP/s and memory bandwidth on all threads of the pool.

use std::hint::black_box;
use std::time::Instant;

use kernels::{Bf16Units, DType};
use pulp::{Arch, Simd, WithSimd};
use rayon::ThreadPool;
use rayon::prelude::*;
use serde::Serialize;

/// Independent accumulators: enough to fill two FMA units at a latency of four cycles, few enough for AVX2's 16
/// registers.
const SUMS: usize = 12;
/// Iterations of a loop of arithmetic: some milliseconds.
const TURNS: usize = 1 << 20;
/// Bytes that are read or copied in one measurement.
const TRAFFIC: usize = 1 << 28;
/// Working sets in bytes: in a core's cache, in the shared cache, and in main memory.
const WORKING_SETS: [usize; 3] = [1 << 20, 1 << 24, 1 << 28];

/// Memory bandwidths of reading a working set, of copying one half of it to the other and of updating it in place. An
/// update counts every byte twice, as read and as written.
#[derive(Serialize)]
struct Bandwidth {
    working_set_bytes: usize,
    read_gigabytes_per_second: f64,
    copy_gigabytes_per_second: f64,
    update_gigabytes_per_second: f64,
}

impl Bandwidth {
    fn measure(pool: &ThreadPool, working_set_bytes: usize, seconds: f64) -> Self {
        let mut memory = vec![1.0_f32; working_set_bytes / size_of::<f32>()];
        let (turns, threads) = (TRAFFIC / working_set_bytes, pool.current_num_threads());
        let gigabytes = (turns * working_set_bytes) as f64 / 1e9;
        let part = memory.len().div_ceil(threads);
        let read = fastest(seconds, || {
            let parts = memory.par_chunks(part);
            pool.install(|| parts.for_each(|part| (0..turns).for_each(|_| Arch::new().dispatch(Read(part)))));
        });
        let update = fastest(seconds, || {
            let parts = memory.par_chunks_mut(part);
            pool.install(|| parts.for_each(|part| (0..turns).for_each(|_| Arch::new().dispatch(Update(part)))));
        });
        let half = memory.len() / 2;
        let (source, target) = memory.split_at_mut(half);
        let part = source.len().div_ceil(threads);
        let copy = fastest(seconds, || {
            let copy = |(target, source): (&mut [f32], &[f32])| {
                (0..turns).for_each(|_| black_box(&mut *target).copy_from_slice(black_box(source)));
            };
            pool.install(|| target.par_chunks_mut(part).zip(source.par_chunks(part)).for_each(copy));
        });
        Self {
            working_set_bytes,
            read_gigabytes_per_second: gigabytes / read,
            copy_gigabytes_per_second: gigabytes / copy,
            update_gigabytes_per_second: 2.0 * gigabytes / update,
        }
    }

    /// Returns the highest of the three bandwidths, in bytes per second.
    fn best(&self) -> f64 {
        let write_rate = self.copy_gigabytes_per_second.max(self.update_gigabytes_per_second);
        self.read_gigabytes_per_second.max(write_rate) * 1e9
    }
}

/// The machine's peak FLOP/s and memory bandwidths, as measured in this process.
#[derive(Serialize)]
pub struct Machine {
    threads: usize,
    f32_gigaflops: f64,
    /// Peak of AVX-512's bf16 dot products; None where the CPU has none.
    avx512_bf16_gigaflops: Option<f64>,
    /// Peak of AMX's products of bf16 tiles; None where the CPU has none.
    amx_bf16_gigaflops: Option<f64>,
    /// The units that our GEMMs of bf16 use.
    bf16_units: &'static str,
    bandwidths: [Bandwidth; WORKING_SETS.len()],
}

impl Machine {
    /// Measures each peak and each bandwidth for `seconds`.
    pub fn measure(pool: &ThreadPool, seconds: f64) -> Self {
        let threads = pool.current_num_threads();
        let gigaflops = |run_loop: fn() -> usize| {
            let flops = run_loop() * threads;
            flops as f64 / 1e9 / fastest(seconds, || drop(pool.broadcast(|_| run_loop())))
        };
        Self {
            threads,
            f32_gigaflops: gigaflops(|| Arch::new().dispatch(MultiplyAdd)),
            avx512_bf16_gigaflops: bf16::dot_products().map(gigaflops),
            amx_bf16_gigaflops: bf16::tile_products().map(gigaflops),
            bf16_units: Bf16Units::of_this_processor().name(),
            bandwidths: WORKING_SETS.map(|bytes| Bandwidth::measure(pool, bytes, seconds)),
        }
    }

    /// Returns the peak FLOP/s for operands of a type, of the fastest unit that can multiply them.
    pub fn flops(&self, dtype: DType) -> f64 {
        let bf16 = [self.avx512_bf16_gigaflops, self.amx_bf16_gigaflops].into_iter().flatten();
        bf16.filter(|_| dtype == DType::BF16).fold(self.f32_gigaflops, f64::max) * 1e9
    }

    /// Returns the bandwidth of main memory, in bytes per second.
    pub fn memory(&self) -> f64 {
        self.cache(usize::MAX)
    }

    /// Returns the bandwidth of repeated passes over a working set of this size, in bytes per second.
    pub fn cache(&self, bytes: usize) -> f64 {
        let [.., memory] = &self.bandwidths;
        self.bandwidths.iter().find(|set| bytes <= set.working_set_bytes).unwrap_or(memory).best()
    }
}

/// Returns the seconds of the fastest of as many calls as fit into `seconds`, after one to warm up.
fn fastest(seconds: f64, mut call: impl FnMut()) -> f64 {
    call();
    let (begin, mut fastest) = (Instant::now(), f64::INFINITY);
    while fastest.is_infinite() || begin.elapsed().as_secs_f64() < seconds {
        let from = Instant::now();
        call();
        fastest = fastest.min(from.elapsed().as_secs_f64());
    }
    fastest
}

/// Multiplies and adds in the widest vectors there are. Returns the floating-point operations.
struct MultiplyAdd;

impl WithSimd for MultiplyAdd {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> usize {
        let factor = simd.splat_f32s(black_box(0.5));
        let mut sums = [factor; SUMS];
        for _ in 0..TURNS {
            for sum in &mut sums {
                *sum = simd.mul_add_f32s(*sum, factor, factor);
            }
        }
        black_box(sums);
        TURNS * SUMS * S::F32_LANES * 2
    }
}

/// Reads every element, in two streams: a core fetches more of two than of one.
struct Read<'a>(&'a [f32]);

impl WithSimd for Read<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let vectors = S::as_simd_f32s(black_box(self.0)).0;
        let (front, back) = vectors.split_at(vectors.len() / 2);
        let mut sums = [simd.splat_f32s(0.0); SUMS];
        for (front, back) in front.chunks_exact(SUMS / 2).zip(back.chunks_exact(SUMS / 2)) {
            for (sum, vector) in sums.iter_mut().zip(front.iter().chain(back)) {
                prefetch_beyond(vector);
                *sum = simd.add_f32s(*sum, *vector);
            }
        }
        black_box(sums);
    }
}

/// Prefetches what lies two pages beyond a vector, where hardware does not prefetch yet.
#[inline(always)]
fn prefetch_beyond<T>(vector: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint that reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>((&raw const *vector).wrapping_byte_add(1 << 13).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = vector;
}

/// Reads and writes every element.
struct Update<'a>(&'a mut [f32]);

impl WithSimd for Update<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let half = simd.splat_f32s(0.5);
        for vector in S::as_mut_simd_f32s(self.0).0 {
            *vector = simd.mul_add_f32s(*vector, half, half);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod bf16 {
    use std::arch::asm;
    use std::arch::x86_64::{_mm512_cvtne2ps_pbh, _mm512_dpbf16_ps, _mm512_set1_ps};
    use std::hint::black_box;

    use kernels::Bf16Units;

    use super::{SUMS, TURNS};

    /// Returns the same loop with dot products of bf16 pairs; None where the CPU does not have them.
    pub(super) fn dot_products() -> Option<fn() -> usize> {
        let has_bf16 = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16");
        // SAFETY: given away only where the processor has the instructions.
        let run_loop: fn() -> usize = || unsafe { multiply_add_pairs() };
        has_bf16.then_some(run_loop)
    }

    /// Returns a loop of products of bf16 tiles; None where the CPU does not have them.
    pub(super) fn tile_products() -> Option<fn() -> usize> {
        // SAFETY: given away only where the processor has the instructions and this process may use them.
        let run_loop: fn() -> usize = || unsafe { multiply_tiles() };
        (Bf16Units::of_this_processor() == Bf16Units::Amx).then_some(run_loop)
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn multiply_add_pairs() -> usize {
        const FLOPS: usize = 32 * 2;
        let half = _mm512_set1_ps(black_box(0.5));
        let pairs = _mm512_cvtne2ps_pbh(half, half);
        let mut sums = [half; SUMS];
        for _ in 0..TURNS {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, pairs, pairs);
            }
        }
        black_box(sums);
        TURNS * SUMS * FLOPS
    }

    /// Four independent tiles of sums, of zeros: the time does not depend on the values.
    ///
    /// # Safety
    /// The CPU has AMX, and this process may use it.
    unsafe fn multiply_tiles() -> usize {
        const TILES: usize = 4;
        const FLOPS: usize = 16 * 16 * 32 * 2;
        const TURNS: usize = super::TURNS / 16;
        /// Palette 1; 64 bytes in a row of each of eight tiles, from byte 16 on; 16 rows, from byte 48 on.
        #[repr(align(64))]
        struct Config([u8; 64]);
        let mut config = Config([0; 64]);
        config.0[0] = 1;
        for tile in 0..8 {
            (config.0[16 + 2 * tile], config.0[48 + tile]) = (64, 16);
        }
        // SAFETY: as promised by the caller.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {turns}",
                "jnz 2b",
                "tilerelease",
                config = in(reg) &raw const config,
                turns = inout(reg) TURNS => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack),
            );
        }
        TURNS * TILES * FLOPS
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod bf16 {
    /// Returns None: no other processor has such an instruction that Rust could call.
    pub(super) fn dot_products() -> Option<fn() -> usize> {
        None
    }

    /// Returns None, as above.
    pub(super) fn tile_products() -> Option<fn() -> usize> {
        None
    }
}
