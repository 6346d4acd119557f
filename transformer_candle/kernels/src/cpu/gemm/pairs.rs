//! Tiles of products of bf16 with AVX-512's own instruction for them, at twice the rate of f32.

pub(super) use imp::Pairs;

#[cfg(target_arch = "x86_64")]
mod imp {
    use std::arch::x86_64::{
        __m512, __m512bh, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    };

    use pulp::x86::V4;

    use crate::Element;
    use crate::cpu::gemm::places::{Columns, Left};
    use crate::cpu::gemm::tile::{SUMS, Tile};

    const ROWS: usize = 14;
    const VECTORS: usize = 2;
    const LANES: usize = 16;

    /// Places hold two elements of K in bf16, the first in the lower half.
    #[derive(Clone, Copy)]
    pub(in crate::cpu::gemm) struct Pairs(V4);

    impl Pairs {
        pub(in crate::cpu::gemm) fn of_this_machine() -> Option<Self> {
            V4::try_new().filter(|_| is_x86_feature_detected!("avx512bf16")).map(Self)
        }
    }

    impl Tile for Pairs {
        type Simd = V4;
        const ROWS: usize = ROWS;
        const COLUMNS: usize = VECTORS * LANES;
        const DEPTH: usize = 2;

        fn simd(self) -> V4 {
            self.0
        }

        #[inline(always)]
        fn place<E: Element>(first: E, second: E) -> f32 {
            let bits = |element: E| u32::from(element.to_bf16().to_bits());
            f32::from_bits(bits(second) << 16 | bits(first))
        }

        fn height(rows: usize) -> usize {
            match rows {
                ..=4 => 4,
                5..=12 => 12,
                _ => rows.min(ROWS),
            }
        }

        #[inline(always)]
        fn sum(self, rows: usize, places: usize, a: impl Left, b: Columns<'_>, sums: &mut [f32; SUMS]) {
            // SAFETY: the machine has the instructions, or there would be no `Pairs`.
            unsafe {
                match Self::height(rows) {
                    4 => sum::<4>(places, a, b, sums),
                    12 => sum::<12>(places, a, b, sums),
                    13 => sum::<13>(places, a, b, sums),
                    _ => sum::<ROWS>(places, a, b, sums),
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn sum<const R: usize>(count: usize, a: impl Left, b: Columns<'_>, sums: &mut [f32; SUMS]) {
        let mut registers = [[_mm512_setzero_ps(); VECTORS]; R];
        let (a, b) = (a.reader::<R>(count), b.pieces(count, VECTORS * LANES));
        for place in 0..count {
            let b = vectors(b(place));
            for (i, registers) in registers.iter_mut().enumerate() {
                add(registers, a(place, i), b);
            }
        }
        let (places, _) = sums.as_chunks_mut::<LANES>();
        // Rows of constant length, so that the sums stay in registers until here.
        for (places, registers) in places.as_chunks_mut::<VECTORS>().0.iter_mut().zip(&registers) {
            for (place, &register) in places.iter_mut().zip(registers) {
                // SAFETY: `place` is a whole vector.
                unsafe { _mm512_storeu_ps(place.as_mut_ptr(), register) };
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn vectors(places: &[f32]) -> [__m512bh; VECTORS] {
        let (left, right) = (places[..LANES].as_ptr(), places[LANES..].as_ptr());
        // SAFETY: both halves are whole vectors.
        unsafe { [pairs(_mm512_loadu_ps(left)), pairs(_mm512_loadu_ps(right))] }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn add(sums: &mut [__m512; VECTORS], a: f32, b: [__m512bh; VECTORS]) {
        let a = pairs(_mm512_set1_ps(a));
        sums[0] = _mm512_dpbf16_ps(sums[0], a, b[0]);
        sums[1] = _mm512_dpbf16_ps(sums[1], a, b[1]);
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn pairs(bits: __m512) -> __m512bh {
        // SAFETY: both types are 512 plain bits.
        unsafe { std::mem::transmute(bits) }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    use pulp::Scalar;

    use crate::Element;
    use crate::cpu::gemm::places::{Columns, Left};
    use crate::cpu::gemm::tile::{SUMS, Tile};

    /// No other machine has such an instruction that Rust could call.
    #[derive(Clone, Copy)]
    pub(in crate::cpu::gemm) enum Pairs {}

    impl Pairs {
        pub(in crate::cpu::gemm) fn of_this_machine() -> Option<Self> {
            None
        }
    }

    impl Tile for Pairs {
        type Simd = Scalar;
        const ROWS: usize = 1;
        const COLUMNS: usize = 1;
        const DEPTH: usize = 2;

        fn simd(self) -> Scalar {
            match self {}
        }

        fn place<E: Element>(_: E, _: E) -> f32 {
            unreachable!("there are no pairs here")
        }

        fn height(_rows: usize) -> usize {
            unreachable!("there are no pairs here")
        }

        fn sum(self, _rows: usize, _places: usize, _a: impl Left, _b: Columns<'_>, _sums: &mut [f32; SUMS]) {
            match self {}
        }
    }
}
