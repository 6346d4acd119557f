//! The two halves of an f32 master weight: the bf16 weight that GEMMs read, and its 16 low bits. See [`crate::cast`].

use crate::bf16;

/// Splits a master weight into its bf16 weight and low bits.
#[inline(always)]
pub fn split(master: f32) -> (bf16, i16) {
    let bits = master.to_bits();
    let high = (bits.wrapping_add(0x8000) >> 16) as u16;
    (bf16::from_bits(high), bits.wrapping_sub(u32::from(high) << 16) as i16)
}

/// Joins a bf16 weight and low bits to their master weight.
#[inline(always)]
pub fn join(weight: bf16, low_bits: i16) -> f32 {
    f32::from_bits((u32::from(weight.to_bits()) << 16).wrapping_add_signed(i32::from(low_bits)))
}
