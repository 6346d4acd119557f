//! The transpose of a small square of 32-bit values, which packing spends its time on.

pub(super) const SIDE: usize = 16;

/// Transposes a square in place.
#[inline(always)]
pub(super) fn transpose(square: &mut [[f32; SIDE]; SIDE]) {
    #[cfg(target_arch = "x86_64")]
    if pulp::x86::V4::is_available() {
        // SAFETY: the machine has AVX-512.
        return unsafe { in_vectors(square) };
    }
    plain(square);
}

fn plain(square: &mut [[f32; SIDE]; SIDE]) {
    for row in 1..SIDE {
        for column in 0..row {
            let (above, below) = square.split_at_mut(row);
            std::mem::swap(&mut above[column][row], &mut below[0][column]);
        }
    }
}

/// By squares of 2, 4, 8 and 16: in each, the upper right and the lower left quarter change places.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn in_vectors(square: &mut [[f32; SIDE]; SIDE]) {
    use std::arch::x86_64::{_mm512_loadu_ps, _mm512_setzero_ps, _mm512_storeu_ps};

    let mut rows = [_mm512_setzero_ps(); SIDE];
    for (row, values) in rows.iter_mut().zip(&*square) {
        // SAFETY: a row is a whole vector.
        *row = unsafe { _mm512_loadu_ps(values.as_ptr()) };
    }
    exchange_quarters::<1>(&mut rows);
    exchange_quarters::<2>(&mut rows);
    exchange_quarters::<4>(&mut rows);
    exchange_quarters::<8>(&mut rows);
    for (row, values) in rows.into_iter().zip(square) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(values.as_mut_ptr(), row) };
    }
}

/// In all squares of twice the size.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn exchange_quarters<const SIZE: usize>(rows: &mut [std::arch::x86_64::__m512; SIDE]) {
    use std::arch::x86_64::{_mm512_loadu_epi32, _mm512_permutex2var_ps};

    // What the upper and the lower of two rows hold afterwards; from 16 on it is the lower row's.
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
    // SAFETY: the indices are whole vectors.
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
        let square = |of: fn(usize, usize) -> usize| -> [[f32; SIDE]; SIDE] {
            std::array::from_fn(|row| std::array::from_fn(|column| of(row, column) as f32))
        };
        for transpose in [transpose, plain] {
            let mut values = square(|row, column| row * SIDE + column);
            transpose(&mut values);
            assert_eq!(values, square(|row, column| column * SIDE + row));
        }
    }
}
