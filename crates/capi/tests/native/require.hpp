// A check that ends the test with the failed condition and its line.

#pragma once

#include <stdexcept>
#include <string>

inline void require(bool held, const char *what, const char *file, int line)
{
    if (!held)
        throw std::logic_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

#define REQUIRE(condition) require(static_cast<bool>(condition), #condition, __FILE__, __LINE__)
