// Lines kept in a directory until they are taken, by a path channel. Neither side needs the other to run, and a line
// that was put survives both.
//
//     producer | keep put DIR        creates DIR if there is none
//     keep take DIR > lines          prints them, and removes them from DIR
#include <iostream>
#include <pelton.hpp>
#include <string>

using namespace std::chrono_literals;

static int fail(const char *what, std::error_code error) {
    std::cerr << what << ": " << error.message() << ": " << pelton::error_detail() << '\n';
    return 1;
}

static int put(const std::string &name) {
    pelton::channel_options options;
    options.create = 1;
    auto sender = pelton::sender::open(name.c_str(), options);
    if (!sender) return fail("opening", sender.error());
    for (std::string line; std::getline(std::cin, line);) {
        // When the channel is full, it waits for the other side.
        auto sent = sender->send(pelton::as_bytes(line), 10s);
        if (!sent) return fail("putting", sent.error());
    }
    auto synced = sender->sync();
    return synced ? 0 : fail("writing to the disk", synced.error());
}

static int take(const std::string &name) {
    auto receiver = pelton::receiver::open(name.c_str());
    if (!receiver) return fail("opening", receiver.error());
    for (;;) {
        auto messages = receiver->messages(pelton::no_wait);
        for (const auto &message : messages) {
            // It is released after this: a process that is killed before finds the line again.
            std::cout << pelton::as_text(message.bytes()) << std::endl;
            if (!std::cout) return 1;
        }
        if (messages.error() == PELTON_AGAIN) return 0;
        // The end of the sender is reported once, and the channel continues.
        if (messages.error() != PELTON_CLOSED && messages.error() != PELTON_PEER_DIED) return fail("taking", messages.error());
    }
}

int main(int argc, char **argv) {
    const std::string verb = argc == 3 ? argv[1] : "";
    if (verb == "put") return put(std::string("path:") + argv[2]);
    if (verb == "take") return take(std::string("path:") + argv[2]);
    std::cerr << "usage: keep put DIR | keep take DIR\n";
    return 2;
}
