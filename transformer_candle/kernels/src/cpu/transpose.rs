//! The transpose of a 16 x 16 tile of f32, for packing and attention.

pub(crate) const SIDE: usize = 16;

/// Writes the transpose of the tile at the start of `source` to the start of `target`; rows are `from` and `to`
/// elements apart.
#[inline(always)]
pub(crate) fn transpose(source: &[f32], from: usize, target: &mut [f32], to: usize) {
    assert!(source.len() >= (SIDE - 1) * from + SIDE && target.len() >= (SIDE - 1) * to + SIDE);
    #[cfg(target_arch = "x86_64")]
    if pulp::x86::V4::is_available() {
        // SAFETY: the CPU has AVX-512, and both slices hold a tile, as asserted.
        return unsafe { in_vectors(source.as_ptr(), from, target.as_mut_ptr(), to) };
    }
    plain(source, from, target, to);
}

/// The transpose without vector instructions. Rows of the target are written in order: where they overlap (`to` below
/// [`SIDE`], in narrow panels), the later one remains.
fn plain(source: &[f32], from: usize, target: &mut [f32], to: usize) {
    for column in 0..SIDE {
        for row in 0..SIDE {
            target[column * to + row] = source[row * from + column];
        }
    }
}

/// Transposes in four rounds, for blocks of 2, 4, 8 and 16: the upper right and lower left quarters of every block are
/// exchanged.
///
/// # Safety
/// Both pointers are valid for a tile, as for [`transpose`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn in_vectors(source: *const f32, from: usize, target: *mut f32, to: usize) {
    use std::arch::x86_64::{_mm512_loadu_ps, _mm512_setzero_ps, _mm512_storeu_ps};

    let mut rows = [_mm512_setzero_ps(); SIDE];
    for (i, row) in rows.iter_mut().enumerate() {
        // SAFETY: a row of the square.
        *row = unsafe { _mm512_loadu_ps(source.add(i * from)) };
    }
    exchange_quarters::<1>(&mut rows);
    exchange_quarters::<2>(&mut rows);
    exchange_quarters::<4>(&mut rows);
    exchange_quarters::<8>(&mut rows);
    for (i, row) in rows.into_iter().enumerate() {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(target.add(i * to), row) };
    }
}

/// Exchanges the off-diagonal quarters of all blocks of twice `SIZE`.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn exchange_quarters<const SIZE: usize>(rows: &mut [std::arch::x86_64::__m512; SIDE]) {
    use std::arch::x86_64::{_mm512_loadu_epi32, _mm512_permutex2var_ps};

    // The indices of what the upper and the lower of two rows hold afterwards; from 16 on they are the lower row's.
    let [upper, lower] = const {
        let (mut upper, mut lower, mut column) = ([0; SIDE], [0; SIDE], 0);
        while column < SIDE {
            let (here, right) = (column as i32, column & SIZE != 0);
            upper[column] = if right { 16 + here - SIZE as i32 } else { here };
            lower[column] = if right { 16 + here } else { here + SIZE as i32 };
            column += 1;
        }
        [upper, lower]
    };
    // SAFETY: both index arrays have 16 elements.
    let (upper, lower) = unsafe { (_mm512_loadu_epi32(upper.as_ptr()), _mm512_loadu_epi32(lower.as_ptr())) };
    for pair in 0..SIDE / 2 {
        let row = pair / SIZE * 2 * SIZE + pair % SIZE;
        let (a, b) = (rows[row], rows[row + SIZE]);
        rows[row] = _mm512_permutex2var_ps(a, upper, b);
        rows[row + SIZE] = _mm512_permutex2var_ps(a, lower, b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_square_is_transposed_with_vectors_and_without() {
        let source: Vec<f32> = (0..SIDE * 20).map(|i| i as f32).collect();
        for transpose in [transpose, plain] {
            let mut target = [-1.0; SIDE * 18];
            transpose(&source, 20, &mut target, 18);
            for (index, &value) in target.iter().enumerate() {
                let (row, column) = (index / 18, index % 18);
                assert_eq!(value, if column < SIDE { source[column * 20 + row] } else { -1.0 });
            }
        }
    }
}
