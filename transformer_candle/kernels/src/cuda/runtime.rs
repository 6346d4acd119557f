//! An opened card: context, stream, kernels, products.
