//! A build without CUDA: no card can be opened, so nothing below runs.

use std::collections::BTreeMap;
use std::convert::Infallible;

use candle_core::{DType, Tensor};

use super::{Product, Value};
use crate::{Error, Result};

/// A card. This build has none.
#[derive(Clone)]
pub struct Cuda(Infallible);

/// A kernel of a card.
pub(crate) struct Kernel<'a>(&'a Infallible);

impl Cuda {
    /// Says that this program was built without CUDA.
    pub fn open(ordinal: usize) -> Result<Self> {
        let reason = "this program was built without CUDA".to_owned();
        Err(Error::NoCuda { ordinal, reason })
    }

    /// The card's number.
    pub fn ordinal(&self) -> usize {
        match self.0 {}
    }

    /// Waits for the stream.
    pub fn synchronize(&self) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn tensor(&self, _shape: &[usize], _dtype: DType) -> Result<Tensor> {
        match self.0 {}
    }

    pub(crate) fn address_of(&self, _tensor: &Tensor) -> Result<usize> {
        match self.0 {}
    }

    pub(crate) fn zero(&self, _address: usize, _bytes: usize) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn copy(&self, _source: usize, _target: usize, _bytes: usize) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn write(&self, _address: usize, _bytes: &[u8]) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn read(&self, _address: usize, _bytes: &mut [u8]) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn kernel(&self, _name: &str) -> Result<Kernel<'_>> {
        match self.0 {}
    }

    pub(crate) fn multiply(&self, _product: &Product) -> Result<()> {
        match self.0 {}
    }

    /// The algorithms of matrix products chosen so far.
    pub fn product_choices(&self) -> BTreeMap<String, String> {
        match self.0 {}
    }

    /// Takes algorithms chosen before; returns those that the card refuses.
    pub fn recall_product_choices(&self, _choices: &BTreeMap<String, String>) -> Result<Vec<String>> {
        match self.0 {}
    }

    /// The BF16 products' floating-point operations a second.
    pub fn measure_product_flops(&self, _size: usize) -> Result<f64> {
        match self.0 {}
    }

    pub(crate) fn timed<R>(&self, _operation: &'static str, _body: impl FnOnce() -> Result<R>) -> Result<R> {
        match self.0 {}
    }
}

impl Kernel<'_> {
    pub(crate) fn constant(&self, _name: &str) -> usize {
        match *self.0 {}
    }

    pub(crate) fn launch(&self, _grid: [usize; 3], _values: &[Value]) -> Result<()> {
        match *self.0 {}
    }
}
