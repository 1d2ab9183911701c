// Lines kept in a directory until somebody takes them: a path channel, by pelton.hpp. Neither side needs the other to be there, and what
// was put survives both.
//
//     producer | keep put DIR        creates DIR if need be
//     keep take DIR > lines          what is there; again, what has come since
#include <cstdio>
#include <iostream>
#include <string>

#include <pelton.hpp>

static int give_up(const char *what, pelton::answer answer) {
    std::fprintf(stderr, "%s: %s: %s\n", what, answer.text(), pelton::error_detail());
    return 1;
}

static int put(const std::string &name) {
    pelton::options options;
    options.create = 1;
    auto sender = pelton::sender::open(name.c_str(), options);
    if (!sender) return give_up("opening", sender);
    for (std::string line; std::getline(std::cin, line);) {
        // Waits for a taker when it is full, 10 seconds.
        auto sent = sender->send(line, pelton::deadline(std::chrono::seconds(10)));
        if (!sent) return give_up("putting", sent);
    }
    auto synced = sender->sync();
    return synced ? 0 : give_up("writing to the disk", synced);
}

static int take(const std::string &name) {
    auto receiver = pelton::receiver::open(name.c_str());
    if (!receiver) return give_up("opening", receiver);
    for (;;) {
        // Released at the end of the scope: who is killed before finds it again.
        auto message = receiver->receive(pelton::no_wait);
        if (message.is_again()) return 0;
        // Who put it has closed, or died, which is told once: everything is here.
        if (message.code() == PELTON_CLOSED || message.code() == PELTON_PEER_DIED) continue;
        if (!message) return give_up("taking", message);
        std::cout << message->payload().text() << '\n';
        if (!std::cout.flush()) return 1;
    }
}

int main(int argc, char **argv) {
    const std::string_view verb = argc == 3 ? argv[1] : "";
    if (verb == "put") return put(std::string("path:") + argv[2]);
    if (verb == "take") return take(std::string("path:") + argv[2]);
    std::fprintf(stderr, "usage: keep put DIR | keep take DIR\n");
    return 2;
}
