;;;; Calls.

(in-package #:pelton-tests)

(defmacro with-serving ((name handler &rest options) &body body)
  "Runs BODY while a thread serves NAME, and has it end."
  (let ((service (gensym)) (thread (gensym)))
    `(pelton:with-service (,service ,name)
       (let ((,thread (in-thread (pelton:serve ,service ,handler ,@options))))
         (unwind-protect (progn ,@body)
           (pelton:stop ,service)
           (joined ,thread))))))

(defun service-name (name)
  (format nil "unix:~a" (in-directory name)))

(deftest calls-are-answered-failed-and-abandoned
  (with-serving ((service-name "s") (lambda (request)
                                      (let ((words (text (pelton:request-octets request))))
                                        (cond ((string= words "fail") (pelton:fail request 7 (bytes "on purpose")))
                                              ((string= words "error") (error "broken"))
                                              ((string= words "nothing") nil)
                                              ((string= words "parts")
                                               (dotimes (i 3) (pelton:reply-part request (bytes (princ-to-string i))))
                                               (pelton:reply request (bytes "3")))
                                              (t (bytes (reverse words))))))
                 :threads 3)
    (pelton:with-client (client (service-name "s") :timeout *patience*)
      (is (equal (text (pelton:call client (bytes "abc") :timeout *patience*)) "cba"))
      (pelton:with-call ((sap size) client (bytes "xyz") :timeout *patience*)
        (is (equal (text (pelton:sap-octets sap size)) "zyx")))
      (let ((condition (signals pelton:call-failed (pelton:call client (bytes "fail") :timeout *patience*))))
        (is (eql (pelton:call-failed-code condition) 7))
        (is (equal (text (pelton:call-failed-octets condition)) "on purpose")))
      (let ((condition (signals pelton:call-failed (pelton:call client (bytes "error") :timeout *patience*))))
        (is (search "broken" (princ-to-string condition))))
      (signals pelton:call-abandoned (pelton:call client (bytes "nothing") :timeout *patience*))
      (is (equal (text (pelton:call client (bytes "parts") :timeout *patience*)) "0123"))
      ;; Larger than a lane.
      (let ((large (make-octets 10000000)))
        (fill large 65)
        (is (equalp (pelton:call client large :timeout *patience*) large)))
      (is (eql 0 (getf (pelton:info client) :calls))))))

(deftest many-calls-are-in-flight-and-awaited-in-any-order
  (with-serving ((service-name "s") #'pelton:request-octets :threads 2)
    (pelton:with-client (client (service-name "s") :timeout *patience*)
      (let ((calls (loop for i below 200 collect (pelton:submit client (number-octets i) :timeout *patience*))))
        (is (equalp (pelton:await client :call (nth 100 calls) :timeout *patience*) (number-octets 100)))
        (let ((left (make-hash-table)))
          (loop for call in calls for i from 0 unless (eql i 100) do (setf (gethash call left) i))
          (dotimes (i 199)
            (multiple-value-bind (octets outcome call) (pelton:await client :timeout *patience*)
              (is (eq outcome :reply))
              (is (equalp octets (number-octets (gethash call left))))
              (remhash call left)))
          (is (eql 0 (hash-table-count left))))
        (signals pelton:refused-error (pelton:await client :call (first calls) :timeout *patience*))))))

(deftest a-call-that-nobody-awaits-is-given-up
  (let ((go-on (sb-thread:make-semaphore)) (cancelled nil))
    (with-serving ((service-name "s") (lambda (request)
                                        (when (equalp (pelton:request-octets request) (bytes "slow"))
                                          (sb-thread:wait-on-semaphore go-on :timeout *patience*)
                                          (setf cancelled (pelton:request-cancelled-p request)))
                                        (bytes "done"))
                   :threads 2)
      (pelton:with-client (client (service-name "s") :timeout *patience*)
        (signals pelton:timed-out (pelton:call client (bytes "slow") :timeout 0.05))
        ;; A second call goes through behind it, so the service has heard.
        (is (equal (text (pelton:call client (bytes "quick") :timeout *patience*)) "done"))
        (sb-thread:signal-semaphore go-on)
        (until cancelled)))))

(deftest a-service-that-ends-is-told-to-its-clients
  (let ((name (service-name "s")) (told 0))
    (let* ((service (pelton:open-service name))
           (thread (in-thread (pelton:serve service (lambda (request) (declare (ignore request)) (incf told) (bytes "y"))))))
      (pelton:with-client (client name :timeout *patience*)
        (is (pelton:notify client (bytes "x") :timeout *patience*))
        (is (equal (text (pelton:call client (bytes "x") :timeout *patience*)) "y"))
        (is (eql told 2))
        (pelton:stop service)
        (joined thread)
        (pelton:close-handle service)
        (signals pelton:channel-ended (pelton:call client (bytes "x") :timeout *patience*))))
    (signals pelton:no-listener-error (pelton:open-client name))))

(deftest a-service-that-waits-can-be-interrupted-and-goes-on-when-it-is-called-again
  (pelton:with-service (service (service-name "s"))
    (dolist (threads '(1 3))
      (dotimes (i 2)
        (signals sb-ext:timeout (sb-ext:with-timeout 0.05 (pelton:serve service #'pelton:request-octets :threads threads))))
      (let ((thread (in-thread (handler-case (pelton:serve service #'pelton:request-octets :threads threads)
                                 (broken () :broken)))))
        (pelton:with-client (client (service-name "s") :timeout *patience*)
          (dotimes (i 5) (is (equalp (pelton:call client (number-octets i) :timeout *patience*) (number-octets i)))))
        (sb-thread:interrupt-thread thread (lambda () (signal 'broken)))
        (is (eq (joined thread) :broken))))))

(define-condition broken (serious-condition) ())

(deftest what-is-no-error-and-leaves-a-handler-is-signalled-by-serve-on-whatever-thread
  (pelton:with-service (service (service-name "s"))
    (dolist (threads '(1 3))
      (let ((thread (in-thread (handler-case (pelton:serve service (lambda (request) (declare (ignore request)) (error 'broken))
                                                           :threads threads)
                                 (broken () :broken)))))
        (pelton:with-client (client (service-name "s") :timeout *patience*)
          (signals pelton:call-abandoned (pelton:call client (bytes "x") :timeout *patience*)))
        (is (eq (joined thread) :broken))))))

(define-condition unprintable (error) () (:report (lambda (condition stream) (declare (ignore condition stream)) (error "not even this"))))

(deftest errors-of-whatever-kind-in-a-handler-fail-the-call
  (with-serving ((service-name "s") (lambda (request)
                                      (if (equalp (pelton:request-octets request) (bytes "x"))
                                          (error 'unprintable)
                                          ;; Of a channel of the handler's own.
                                          (pelton:with-channel (sender receiver)
                                            (pelton:close-handle sender)
                                            (pelton:receive receiver)))))
    (pelton:with-client (client (service-name "s") :timeout *patience*)
      (signals pelton:call-failed (pelton:call client (bytes "x") :timeout *patience*))
      (signals pelton:call-failed (pelton:call client (bytes "y") :timeout *patience*)))))

(deftest interrupts-that-unwind-from-serve-leave-no-client-waiting
  (pelton:with-service (service (service-name "s"))
    (let* ((ended nil) (interrupts 0)
           (thread (in-thread (loop until ended
                                    do (catch 'out
                                         (let ((*inside* t))
                                           (pelton:serve service #'pelton:request-octets))))))
           (disturber (in-thread (disturb thread (lambda () ended)
                                          (lambda () (when *inside* (incf interrupts) (throw 'out nil)))))))
      (pelton:with-client (client (service-name "s") :timeout *patience*)
        (let ((answered 0))
          (loop until (and (>= interrupts 100) (>= answered 100))
                do (handler-case (progn (pelton:call client (bytes "x") :timeout *patience*) (incf answered))
                     (pelton:call-abandoned ())))
          (is (>= answered 100))))
      (setf ended t)
      (pelton:stop service)
      (joined disturber)
      (joined thread))))

(deftest an-answer-that-an-interrupt-keeps-from-being-shown-is-shown-to-who-awaits-next
  (with-serving ((service-name "s") #'pelton:request-octets)
    (pelton:with-client (client (service-name "s") :timeout *patience*)
      (let ((first (pelton:submit client (bytes "first"))) (second (pelton:submit client (bytes "second"))))
        (is (equal (text (pelton:await client :call second :timeout *patience*)) "second"))
        ;; It has come: one thread answers in order.
        (with-an-interrupt-pending (pelton:await client :call first :timeout *patience*))
        (is (eql 1 (length (pelton::client-unseen client))))
        (multiple-value-bind (octets outcome call) (pelton:await client :timeout *patience*)
          (is (equal (list (text octets) outcome call) (list "first" :reply first))))
        (signals pelton:refused-error (pelton:await client :call first :timeout *patience*))))))

(deftest who-asks-much-at-once-takes-in-answers-meanwhile
  (with-serving ((service-name "s") #'pelton:request-octets)
    (pelton:with-client (client (service-name "s") :timeout *patience*)
      (let* ((large (make-octets 200000)) (calls (loop repeat 100 collect (pelton:submit client large :timeout *patience*))))
        (dolist (call calls) (is (eql 200000 (length (pelton:await client :call call :timeout *patience*))))))
      ;; More small ones than there may be: so many answers wait in the end that waiting would not help.
      (let ((asked 0))
        (signals pelton:refused-error (loop (pelton:submit client (bytes "x") :timeout *patience*) (incf asked)))
        (is (>= asked 1024))
        (is (pelton:notify client (bytes "x") :timeout *patience*))
        (dotimes (i asked) (pelton:await client :timeout *patience*))
        (is (pelton:call client (bytes "x") :timeout *patience*))))))

(deftest parts-of-an-answer-are-joined-or-given-up
  (is (eql 300000 (length (pelton::joined (loop repeat 300000 collect (make-octets 1))))))
  (with-serving ((service-name "s") (lambda (request)
                                      (dotimes (i 3) (pelton:reply-part request (bytes "part")))
                                      (bytes "end")))
    (pelton:with-client (client (service-name "s") :timeout *patience*)
      (is (equal "part" (pelton:with-call ((sap size) client (bytes "x") :timeout *patience*) (text (pelton:sap-octets sap size)))))
      (is (equal "partpartpartend" (text (pelton:call client (bytes "x") :timeout *patience*))))
      (signals pelton:timed-out (pelton:await client :timeout 0)))))
