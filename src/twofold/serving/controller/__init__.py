"""The controller: places requests on workers, passes leases on, and brings tokens back in order.

It is the one place where the life of a request is known as a whole, and the only sender of requests, leases
and aborts to workers. So a worker hears of a request before it hears of its lease, and a lease that is granted
after its request ended is given back from here. A request whose worker is lost begins another attempt; one that
nobody can take just now waits.

    controller.py   what the gateway asks for, and the life of the controller itself
    requests.py     a request: taken, placed, sent, its tokens handed on, replayed, ended
    incoming.py     what workers and hosts say, and who is told of it
    progress.py     what workers say of the requests that they run: leases, tokens, hand-offs
    members.py      the workers: they register, change, retire and are lost
    elsewhere.py    those of other hosts come and go with these
    shortage.py     a smaller plan where the launcher has no room for all of them
    trust.py        who of them is given requests
    watch.py        what is looked after when nobody says anything

A request goes through requests.py to the workers, and comes back through incoming.py and progress.py.
"""
