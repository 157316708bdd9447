// The whole C++ interface, except `kernel_arguments.hpp`, which programs with kernels include in addition.

#pragma once

#include <wholemem/communicator.hpp>
#include <wholemem/device.hpp>
#include <wholemem/doctor.hpp>
#include <wholemem/dtype.hpp>
#include <wholemem/error.hpp>
#include <wholemem/graph.hpp>
#include <wholemem/log.hpp>
#include <wholemem/memory.hpp>
#include <wholemem/span.hpp>
#include <wholemem/store.hpp>
#include <wholemem/symmetric.hpp>
#include <wholemem/tensor.hpp>
#include <wholemem/timeout.hpp>
