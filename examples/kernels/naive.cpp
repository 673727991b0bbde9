// The first rung: naive.h has the kernel.
//   g++ -O3 -march=native -std=c++20 naive.cpp && ./a.out
#include "check.h"

int main() { return check("naive", naive<float>); }
