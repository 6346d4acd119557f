//! Errors that pass through the decoders of other libraries, and come out as they went in.

use super::DataError;

impl DataError {
    /// Converts an error of a decoder that reads through this crate: the error of our reader if there is one, else
    /// corruption of the file.
    pub(crate) fn decoding<E: std::error::Error + Send + Sync + 'static>(file: &str) -> impl FnOnce(E) -> Self {
        move |error| {
            let message = error.to_string();
            find_data_error(Box::new(error)).unwrap_or_else(|()| Self::Format { file: file.to_owned(), message })
        }
    }
}

impl From<DataError> for std::io::Error {
    fn from(error: DataError) -> Self {
        Self::other(error)
    }
}

impl From<DataError> for parquet::errors::ParquetError {
    fn from(error: DataError) -> Self {
        Self::External(Box::new(error))
    }
}

/// Finds this crate's own error below the wrappers that decoders put around it.
fn find_data_error(error: Box<dyn std::error::Error + Send + Sync>) -> Result<DataError, ()> {
    let error = match error.downcast::<DataError>() {
        Ok(error) => return Ok(*error),
        Err(error) => error,
    };
    let error = match error.downcast::<std::io::Error>() {
        Ok(error) => return error.into_inner().map_or(Err(()), find_data_error),
        Err(error) => error,
    };
    match error.downcast::<parquet::errors::ParquetError>() {
        Ok(error) => match *error {
            parquet::errors::ParquetError::External(inner) => find_data_error(inner),
            _ => Err(()),
        },
        Err(_) => Err(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_our_readers_survive_decoders() {
        let network =
            || DataError::Network { url: "https://hub/x".to_owned(), attempts: 3, message: "reset".to_owned() };
        let through_io = DataError::decoding("f")(std::io::Error::from(network()));
        let through_both = parquet::errors::ParquetError::External(Box::new(std::io::Error::from(network())));
        assert!(matches!(through_io, DataError::Network { .. }));
        assert!(matches!(DataError::decoding("f")(through_both), DataError::Network { .. }));
        let corruption = parquet::errors::ParquetError::EOF("short".to_owned());
        assert!(matches!(DataError::decoding("f")(corruption), DataError::Format { .. }));
    }
}
