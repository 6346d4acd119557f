//! Python classes around values of the trainer.

use crate::json;

/// Defines a frozen class around a value, with a read-only attribute per listed field and `to_dict`, which returns all
/// fields as in JSON. Further methods may follow.
macro_rules! value_class {
    (
        $(#[$about:meta])*
        $class:ident($value:ty) {
            $($(#[$text:meta])* $field:ident: $type:ty,)*
        }
        $($methods:tt)*
    ) => {
        $(#[$about])*
        #[pyclass(frozen, module = "orchestrator._native")]
        pub struct $class($value);

        impl From<$value> for $class {
            fn from(value: $value) -> Self {
                Self(value)
            }
        }

        #[pymethods]
        impl $class {
            $(
                $(#[$text])*
                #[getter]
                fn $field(&self) -> $type {
                    $crate::values::ToPython::to_python_value(&self.0.$field)
                }
            )*

            /// Return all fields as plain values.
            fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                $crate::json::to_python(py, &self.0)
            }

            $($methods)*
        }
    };
}
pub(crate) use value_class;

/// Conversion of a field to the type of its Python attribute.
pub trait ToPython<T> {
    /// Returns the attribute's value.
    fn to_python_value(&self) -> T;
}

impl<T: Clone> ToPython<T> for T {
    fn to_python_value(&self) -> T {
        self.clone()
    }
}

impl ToPython<f64> for f32 {
    fn to_python_value(&self) -> f64 {
        json::shortest(*self)
    }
}
