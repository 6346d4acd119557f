//! The element types: what a buffer holds ([`Scalar`]), what activations and weights are made of ([`Element`]), and
//! what the plain references compute in ([`Real`]).

use candle_core::{DType, WithDType};
use half::bf16;

/// An element type that a [`crate::Buffer`] can hold: f32, bf16, u32, i32, i16, u8.
///
/// Sealed: the slices handed out of a buffer rely on `DTYPE` naming the storage's true element type.
pub trait Scalar: WithDType + sealed::Sealed {}

mod sealed {
    pub trait Sealed {}
}

macro_rules! scalars {
    ($($name:ty),*) => { $(impl sealed::Sealed for $name {} impl Scalar for $name {})* };
}
scalars!(f32, bf16, u32, i32, i16, u8);

/// The element types that a [`crate::Buffer`] can hold, for messages.
pub(crate) const BUFFER_TYPES: &str = "F32, BF16, U32, I32, I16 or U8";

/// A floating-point element of activations and weights; arithmetic happens in f32.
pub trait Element: Scalar + Default {
    /// The value in f32, exactly.
    fn widen(self) -> f32;
    /// The nearest value of this type, ties to even.
    fn narrow(value: f32) -> Self;
    /// The nearest bf16.
    fn to_bf16(self) -> bf16;
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }
    #[inline(always)]
    fn to_bf16(self) -> bf16 {
        bf16::narrow(self)
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    /// Without branches, so that loops over it vectorise.
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet_nan = (bits >> 16) | 0x40;
        bf16::from_bits(if value.is_nan() { quiet_nan } else { rounded } as u16)
    }
    #[inline(always)]
    fn to_bf16(self) -> bf16 {
        self
    }
}

/// Runs a body with `$E` standing for the element type that `$dtype` names, or returns [`crate::Error::DType`].
macro_rules! with_element {
    ($operation:expr, $argument:expr, $dtype:expr, $E:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $E = f32;
                $body
            }
            candle_core::DType::BF16 => {
                type $E = half::bf16;
                $body
            }
            other => Err($crate::element::not_an_element($operation, $argument, other)),
        }
    };
}
pub(crate) use with_element;

/// Like `with_element`, with `$O` standing for the element type of a result that `$result` names: that of the
/// operands, or F32 beside BF16 ones.
macro_rules! with_elements {
    ($operation:expr, $argument:expr, [$dtype:expr, $result:expr], [$E:ident, $O:ident] => $body:expr) => {
        match ($dtype, $result) {
            (candle_core::DType::BF16, candle_core::DType::F32) => {
                type $E = half::bf16;
                type $O = f32;
                $body
            }
            (dtype, _) => $crate::element::with_element!($operation, $argument, dtype, $E => {
                type $O = $E;
                $body
            }),
        }
    };
}
pub(crate) use with_elements;

/// The element type that a result must have beside operands of `dtype`: theirs, unless it is kept in F32.
pub(crate) fn result_dtype(actual: DType, dtype: DType) -> DType {
    if actual == DType::F32 { actual } else { dtype }
}

pub(crate) fn not_an_element(operation: &'static str, argument: &'static str, actual: DType) -> crate::Error {
    crate::Error::DType { operation, argument, expected: "F32 or BF16", actual }
}

/// The number type of the plain references: f32, or f64 where they serve as an oracle.
pub trait Real:
    Copy
    + PartialOrd
    + std::fmt::Debug
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
    + std::ops::AddAssign
    + std::ops::SubAssign
    + std::ops::MulAssign
    + std::iter::Sum
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// The nearest value.
    fn from_f64(value: f64) -> Self;
    /// The value in f64, exactly.
    fn to_f64(self) -> f64;
    /// e to the power of the value.
    #[must_use]
    fn exp(self) -> Self;
    /// Natural logarithm.
    #[must_use]
    fn ln(self) -> Self;
    /// Square root.
    #[must_use]
    fn sqrt(self) -> Self;
    /// The larger of two.
    #[must_use]
    fn max(self, other: Self) -> Self;
}

macro_rules! reals {
    ($($name:ident),*) => {
        $(impl Real for $name {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            fn from_f64(value: f64) -> Self {
                value as $name
            }
            fn to_f64(self) -> f64 {
                self as f64
            }
            fn exp(self) -> Self {
                $name::exp(self)
            }
            fn ln(self) -> Self {
                $name::ln(self)
            }
            fn sqrt(self) -> Self {
                $name::sqrt(self)
            }
            fn max(self, other: Self) -> Self {
                $name::max(self, other)
            }
        })*
    };
}
reals!(f32, f64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrowing_agrees_with_the_half_crate_on_every_kind_of_value() {
        let patterns = (0..=u16::MAX)
            .flat_map(|high| [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| u32::from(high) << 16 | low));
        for bits in patterns {
            let value = f32::from_bits(bits);
            let ours = bf16::narrow(value);
            assert_eq!(ours.to_bits(), bf16::from_f32(value).to_bits(), "{bits:#x}");
            let back = ours.widen();
            assert!(back.to_bits() == ours.to_f32().to_bits() || back.is_nan());
        }
    }
}
