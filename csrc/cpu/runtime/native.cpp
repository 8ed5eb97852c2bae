// Prints the best instruction set of this machine, and the one that decodes for it if that is
// another, as a list of CMake, which runs it for FASTATTN_ISAS=native. Arguments: the sets to choose
// from, the widest last.
#include <cstdio>

#include "isa_choice.h"
#include "isa_here.h"

int main(int count, char** names) {
  std::string here;
  for (int i = 1; i < count; ++i)
    if (std::string(names[i]) != "amx_model" && fa::runs_here(names[i]))
      here = names[i] + (here.empty() ? "" : "," + here);
  const fa::Order order = fa::order_for(fa::this_chip(), here);
  std::fputs(order.isa.c_str(), stdout);
  if (order.decoding != order.isa) std::printf(";%s", order.decoding.c_str());
}
