"""Twelve programs that nobody wants to run, for the tests of the sandbox."""
MAIN = "\nint main() {"
INCLUDES = """
#include <arpa/inet.h>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>
"""
# {what it does: (its main(), the expected verdicts)}. Where the sandbox keeps a program from what it tries, the program
# itself says so, by ending with status 0.
PROGRAMS = {
    "endless loop": ("volatile int i = 0; for (;;) ++i; }", {"timeout"}),
    "memory": ("""std::vector<char*> blocks;
    while (char* block = static_cast<char*>(malloc(1 << 24))) { memset(block, 1, 1 << 24); blocks.push_back(block); }
    return blocks.size() < 32 ? 0 : 1; }""", {"passed"}),
    "fork bomb": ("""int made = 0;
    while (made < 1000) { pid_t pid = fork(); if (pid < 0) break; if (pid == 0) { pause(); } ++made; }
    return made < 20 ? 0 : 1; }""", {"passed"}),
    "network": ("""int s = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in to{}; to.sin_family = AF_INET; to.sin_port = htons(PORT); to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return s >= 0 && connect(s, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0 ? 1 : 0; }""", {"passed"}),
    "large file": ("""FILE* file = fopen("/tmp/large", "w"); std::vector<char> block(1 << 20);
    for (int i = 0; i < 1000; ++i) fwrite(block.data(), 1, block.size(), file);
    return 0; }""", {"crashed"}),  # by SIGXFSZ
    "many files": ("""std::vector<char> block(1 << 20); long written = 0;
    for (int i = 0; i < 500; ++i) { FILE* file = fopen(("/tmp/" + std::to_string(i)).c_str(), "w");
      if (file) { written += fwrite(block.data(), 1, block.size(), file); fclose(file); } }
    return written <= 64 << 20 ? 0 : 1; }""", {"passed"}),
    "output": ("for (;;) puts(\"spam spam spam spam\"); }", {"too much output"}),
    "signal to the parent": ("""kill(getppid(), SIGKILL); kill(VICTIM, SIGKILL); kill(-1, SIGKILL); return 0; }""",
                             {"passed"}),
    "sleeper": ("""if (fork() == 0) {
      setsid(); fclose(stdout); fclose(stderr); if (fork() == 0) sleep(1000); _exit(0); }
    fclose(stdout); fclose(stderr); sleep(1000); return 0; }""", {"timeout"}),
    "writes outside": ("""int made = 0;
    for (const char* path : {"/written", "/usr/written", "/dev/written", "/home", "/var", "VICTIM_FOLDER"})
      made += open((std::string(path) + "/x").c_str(), O_CREAT | O_WRONLY, 0600) >= 0;
    return made + (unlink("/usr/bin/g++") == 0) + (mkdir("/new", 0700) == 0); }""", {"passed"}),
    "reads /etc": ("""int opened = 0;
    for (const char* path : {"/etc/passwd", "/etc/hostname", "/root", "/home", "VICTIM_FOLDER", "/var/log"})
      opened += open(path, O_RDONLY) >= 0;
    return opened; }""", {"passed"}),
    "another process's memory": ("""int others = 0;
    DIR* processes = opendir("/proc");
    while (dirent* entry = readdir(processes)) others += atoi(entry->d_name) > 2;
    return others; }""", {"passed"}),
}
SOURCES = {  # which attack the compiler
    "#include of a device": '#include "/dev/zero"\nint main() {}',
    "#include of a file": '#include "/etc/passwd"\nint main() {}',
    "assembler that reads a device": 'asm(".incbin \\"/dev/zero\\"");\nint main() {}',
    "template bomb": """template <int N, typename L, typename R> struct Bomb {
    typename Bomb<N - 1, Bomb<N, L, R>, R>::type left; typename Bomb<N - 1, L, Bomb<N, L, R>>::type right;
    using type = Bomb; };
template <typename L, typename R> struct Bomb<0, L, R> { using type = int; };
Bomb<60, int, char> bomb;
int main() {}""",
    "large array": "char large[1L << 40] = {1};\nint main() {}",
}


def program(name, port=0, victim=0, victim_folder=""):
    """Returns the code of one of PROGRAMS, aimed at a port, a process and a folder of the machine."""
    code = PROGRAMS[name][0].replace("PORT", str(port)).replace("VICTIM_FOLDER", str(victim_folder))
    return f"{INCLUDES}#include <string>{MAIN}\n    {code.replace('VICTIM', str(victim))}\n"
