//! Matrix products by cuBLASLt.

use super::Cuda;
use crate::cuda::Product;
use crate::{Error, Result};

/// The algorithms chosen so far.
#[derive(Default)]
pub(super) struct Products;

impl Cuda {
    pub(crate) fn multiply(&self, _product: &Product) -> Result<()> {
        Err(Error::Invalid { operation: "multiply", problem: "not there".to_owned() })
    }
}
