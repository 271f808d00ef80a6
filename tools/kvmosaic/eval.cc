// kvmosaic eval: measurements other than compare, one subcommand each.
#include "kvmosaic/app.h"

namespace kvmosaic::tool {

void add_eval(CLI::App& app) {
    CLI::App* verb = app.add_subcommand("eval", "other measurements: passkey, component, channels");
    verb->require_subcommand(1);
    add_passkey(*verb);
    add_component(*verb);
    add_channels(*verb);
    verb->footer("Examples\n"
                 "  kvmosaic eval passkey -m tiny --cache mixkvq --cache kivi:bits=2\n"
                 "  kvmosaic eval component --cache pnmix\n"
                 "  kvmosaic eval channels -m tiny -f text.txt\n"
                 "  kvmosaic eval passkey --help");
}

} // namespace kvmosaic::tool
