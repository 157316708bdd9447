// The checks that every rank of the test program makes.

#pragma once

#include <wholemem/wholemem.hpp>

/// Tests tables of every kind and location, windows and collective calls.
void check_rank(const wholemem::Communicator &communicator);
